"""What steers a picture beside its prompt, changed while a patch is on: ControlNets, IP-Adapters, LoRAs.

Real pipelines with random weights. That such calls merge and repeat at all is `test_one_line.py`'s to hold, and that a
LoRA or an image prompt may come and go at any time `tests/beside`'s.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import tome_core
from tests.image_prompts import load_image_prompts
from tests.pipeline_uses import USES
from tests.pipelines import TIMES, assert_merged, differ, draw, latents, merged_alone
from tests.traces import traces
from tome_core import preset

CHANGE_AFTER = 1  # steps of `TIMES`: in the middle of what a preset keeps a match for

# --- ControlNet ------------------------------------------------------------------------------------------------------


def test_a_controlnet_is_merged_where_it_is_asked_for(build, load):
    """By a patch of its own, beside the UNet's or alone, and taken off alone."""
    pipe, call = USES["controlnet"](build(), load)
    before, plain, unet_alone = traces(pipe.controlnet), draw(pipe, **call), merged_alone(pipe, **call)
    with tome_core.patch(pipe.controlnet) as net:
        net_alone = draw(pipe, **call)
        assert_merged(net)
        assert torch.equal(draw(pipe, **call), net_alone)
        both = merged_alone(pipe, **call)
        assert torch.equal(draw(pipe, **call), net_alone), "the UNet's came off and left the ControlNet's on"
    assert differ(plain, unet_alone, net_alone, both)
    assert torch.equal(draw(pipe, **call), plain) and traces(pipe.controlnet) == before


def test_a_controlnet_is_left_alone_where_it_is_not(build, load):
    pipe, call = USES["controlnet"](build(), load)
    seen: list[torch.Tensor] = []
    hook = pipe.controlnet.register_forward_hook(lambda net, args, out: seen.append(out[1]))
    draw(pipe, **call)
    merged_alone(pipe, **call)
    hook.remove()
    assert len(seen) == 2 * len(TIMES) and torch.equal(seen[0], seen[len(TIMES)]), "of the same first latent"


# --- IP-Adapter ------------------------------------------------------------------------------------------------------


def halves(pipe: Any) -> dict[str, Any]:
    """A mask for each of two adapters: the left half of the picture, and the right one."""
    side = pipe.unet.config.sample_size * pipe.vae_scale_factor
    left = torch.zeros(1, 1, side, side)
    left[..., : side // 2] = 1
    return {"cross_attention_kwargs": {"ip_adapter_masks": [left, 1 - left]}}


def test_where_the_attention_to_the_prompt_merges_too_a_mask_is_the_reason_to_leave_that_alone(build):
    """A mask is laid over a grid, which merged tokens are not; without one they read the image as they read words."""
    pipe = build()
    call, config = load_image_prompts(pipe, 2), replace(preset("balanced"), merge_crossattn=True)
    plain, masked = draw(pipe, **call), {**call, **halves(pipe)}
    with tome_core.patch(pipe, config) as handle:
        unmasked = draw(pipe, **call)
        assert "adapter's mask" not in str(handle.report())
        by_region = draw(pipe, **masked)
        assert "crossattn: an adapter's mask needs every token" in str(handle.report())
        assert torch.equal(draw(pipe, **call), unmasked)
    assert torch.equal(by_region, merged_alone(pipe, **masked))
    assert differ(plain, unmasked, by_region, merged_alone(pipe, **call)) and torch.equal(draw(pipe, **call), plain)


# --- LoRAs -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_each_picture_is_its_adapters_own(build, load):
    """A match that one adapter's keys found must not serve another's."""
    pipe, other = build(), build()
    handle = tome_core.patch(pipe)
    load(pipe, "one", "two")
    load(other, "one", "two")
    pictures = []
    for adapters, weights in (("one", 1.0), ("two", 1.0), (["one", "two"], [0.3, 0.7]), ("one", 0.5), ("one", 1.0)):
        for each in (pipe, other):
            each.set_adapters(adapters, weights)
        pictures.append(draw(pipe))
        assert torch.equal(pictures[-1], merged_alone(other))
    pipe.disable_lora()
    assert torch.equal(draw(pipe), merged_alone(build()))
    assert differ(*pictures[:4]) and torch.equal(pictures[0], pictures[4])
    assert_merged(handle)


# --- within a picture ------------------------------------------------------------------------------------------------


def _lora(pipe: Any, load: Any) -> tuple[dict[str, Any], Callable[[bool], None]]:
    load(pipe, "one", "two")
    return {}, lambda changed: pipe.set_adapters("two" if changed else "one")


def _image_prompt(pipe: Any, load: Any) -> tuple[dict[str, Any], Callable[[bool], None]]:
    """As programs let an image act on some of the steps alone."""
    call = load_image_prompts(pipe)
    return call, lambda changed: pipe.set_ip_adapter_scale(0.0 if changed else 1.0)


@pytest.mark.parametrize("kind, steers", [("sd15", _lora), ("sdxl", _image_prompt)])
def test_what_changes_within_a_picture_acts_from_there_on_and_no_further(build, load, kind: str, steers: Any):
    pipe = build(kind)
    call, steer = steers(pipe, load)

    def drawn(changes: bool) -> list[torch.Tensor]:
        steer(False)
        return latents(pipe, CHANGE_AFTER, lambda: steer(changes), **call)

    plain = drawn(True)
    with tome_core.patch(pipe) as handle:
        all_along, changed, again = drawn(False), drawn(True), drawn(False)
        assert_merged(handle)
    same = [torch.equal(*pair) for pair in zip(all_along, changed, strict=True)]
    assert same == [number < CHANGE_AFTER for number in range(len(TIMES))]
    assert all(map(torch.equal, all_along, again)) and differ(plain[-1], all_along[-1], changed[-1])
    with tome_core.patch(pipe):
        assert torch.equal(drawn(True)[-1], changed[-1]), "whatever was drawn before"
