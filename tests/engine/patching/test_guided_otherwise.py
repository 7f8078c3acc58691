"""What steers a picture beside its prompt, changed while a patch is on: ControlNets, IP-Adapters, LoRAs.

Real pipelines with random weights; that such calls merge and repeat at all is `test_one_line.py`'s to hold.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import tome_core
from tests.image_prompts import load_image_prompts
from tests.pipeline_uses import USES
from tests.pipelines import TIMES, assert_merged, differ, draw, latents, merged_alone
from tests.traces import traces

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


def test_an_image_prompts_scale_may_change_between_pictures(build, load):
    (pipe, call), (other, _) = (USES["image prompt"](build(), load) for _ in range(2))
    handle = tome_core.patch(pipe)
    pictures = []
    for scale in (1.0, 0.3, 0.0, 1.0):
        for each in (pipe, other):
            each.set_ip_adapter_scale(scale)
        pictures.append(draw(pipe, **call))
        assert torch.equal(pictures[-1], merged_alone(other, **call))
    assert differ(*pictures[:3]) and torch.equal(pictures[0], pictures[3])
    assert_merged(handle)


def test_an_image_prompt_may_come_and_go_while_a_patch_is_on(build, load):
    pipe, merged = build(), merged_alone(build())
    other, call = USES["image prompt"](build(), load)
    handle = tome_core.patch(pipe)
    assert torch.equal(draw(pipe), merged)
    USES["image prompt"](pipe, load)
    assert torch.equal(draw(pipe, **call), merged_alone(other, **call))
    pipe.unload_ip_adapter()
    assert torch.equal(draw(pipe), merged)
    assert_merged(handle)


# --- within a picture; between pictures LoRAs change in `test_pipeline_changes.py` -----------------------------------


def _lora(pipe: Any, load: Any) -> tuple[dict[str, Any], Callable[[bool], None]]:
    load(pipe, "one", "two")
    return {}, lambda changed: pipe.set_adapters("two" if changed else "one")


def _image_prompt(pipe: Any, load: Any) -> tuple[dict[str, Any], Callable[[bool], None]]:
    """As programs let an image act on some of the steps alone."""
    call = load_image_prompts(pipe)
    return call, lambda changed: pipe.set_ip_adapter_scale(0.0 if changed else 1.0)


@pytest.mark.parametrize("kind, steers", [("sd15", _lora), ("sd15", _image_prompt), ("sdxl", _image_prompt)])
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
