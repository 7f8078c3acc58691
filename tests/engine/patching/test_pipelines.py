"""`tome_core.patch(pipe)`: one line puts a preset on a diffusers pipeline, one takes it off, whatever it draws between.

Real pipelines with random weights. That a LoRA may come and go at any time is `tests/beside`'s.
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import diffusers
import pytest
import torch

import tome_core
from tests import pipelines
from tests.image_prompts import load_image_prompts
from tests.pipeline_uses import USES
from tests.pipelines import IMAGE_TIMES, TIMES, an_image, assert_merged, differ, draw, every_kind, merged_alone
from tests.threads import at_once
from tests.traces import traces
from tome_core import preset
from tome_core.patching import handle_on


@pytest.mark.slow
@pytest.mark.parametrize("use", USES)
def test_every_call_merges_and_is_the_same_again(build, load, use: str):
    pipe, call = USES[use](build(), load)
    plain = draw(pipe, **call)
    handle = tome_core.patch(pipe)
    first = draw(pipe, **call)
    draw(pipe, **{**call, "guidance_scale": 2.0}, seed=5)
    assert torch.equal(draw(pipe, **call), first) and torch.equal(merged_alone(pipe, **call), first)
    assert_merged(handle)
    tome_core.remove_patch(pipe)
    assert differ(plain, first) and torch.equal(draw(pipe, **call), plain)


def test_the_pages_file_for_sdnext_patches_what_is_loaded_whatever_sampler_comes(build, monkeypatch):
    """Its scripts register what is called with every pipeline that it loads; it takes another sampler for each picture,
    a copy of the first one where none is named, and raises where somebody interrupts.
    """
    loaded: list[Callable[[Any], Any]] = []
    modules, callbacks = ModuleType("modules"), ModuleType("modules.script_callbacks")
    callbacks.on_model_loaded = loaded.append
    modules.script_callbacks = callbacks
    monkeypatch.setitem(sys.modules, "modules", modules)
    text = (Path(__file__).parents[3] / "docs" / "webui.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```py\n(.*?)^```$", text.split("## In SD.Next")[1].split("\n## ")[0], re.S | re.M)
    exec(code, {})
    pipe, merged = build(), merged_alone(build())
    loaded[0](pipe)
    default = copy.deepcopy(pipe.scheduler)

    def interrupt(*_: Any) -> None:
        raise AssertionError("Interrupted...")

    for _ in range(2):
        pipe.scheduler = copy.deepcopy(default)
        assert torch.equal(draw(pipe), merged)
        pipe.scheduler = diffusers.UniPCMultistepScheduler.from_config(default.config)
        with pytest.raises(AssertionError, match="Interrupted"):
            draw(pipe, seed=5, timesteps=None, num_inference_steps=12, callback_on_step_end=interrupt)
    assert_merged(handle_on(pipe.unet))


# --- several pipelines, and threads -----------------------------------------------------------------------------------


def image_to_image(pipe: Any) -> tuple[Any, dict[str, Any]]:
    """A pipeline of the same modules, with a scheduler of its own, and what its call needs."""
    sibling = diffusers.AutoPipelineForImage2Image.from_pipe(pipe)
    sibling.scheduler = type(pipe.scheduler).from_config(pipe.scheduler.config)
    return sibling, {"image": an_image(pipe), "strength": 0.8, "timesteps": IMAGE_TIMES}


def twice(*args: Any, **more: Any) -> list[torch.Tensor]:
    return [draw(*args, **more) for _ in range(2)]


@pytest.mark.slow
@every_kind
def test_pipelines_that_share_a_unet_share_the_patch_one_after_the_other_and_at_once(build, kind: str):
    """But for matches, which serve the steps of the pipeline that was patched."""
    text, (image, call) = (pipe := build(kind)), image_to_image(pipe)
    for name in ("tokenizer", "tokenizer_2"):  # how it pads is a tokenizer's state: two threads cannot share one
        if getattr(image, name, None) is not None:
            setattr(image, name, copy.deepcopy(getattr(image, name)))
    plain = draw(text), draw(image, **call)
    alone = merged_alone(text), merged_alone(image, pipelines.keeps_nothing(image), **call)
    handle = tome_core.patch(text)
    works = partial(twice, text), partial(twice, image, **call)
    for both in ([work() for work in works], at_once(*works)):
        for expected, pictures in zip(alone, both, strict=True):
            assert all(torch.equal(picture, expected) for picture in pictures)
    assert_merged(handle)
    assert differ(*plain, *alone)
    tome_core.remove_patch(image)
    assert torch.equal(draw(text), plain[0]) and torch.equal(draw(image, **call), plain[1])


# --- what steers a picture beside its prompt --------------------------------------------------------------------------


def test_a_controlnet_is_merged_if_it_is_asked_for_and_left_alone_if_not(build, load):
    """By a patch of its own, beside the UNet's or alone, and taken off alone."""
    pipe, call = USES["controlnet"](build(), load)
    seen: list[torch.Tensor] = []
    hook = pipe.controlnet.register_forward_hook(lambda net, args, out: seen.append(out[1]))
    plain, unet_alone = draw(pipe, **call), merged_alone(pipe, **call)
    hook.remove()
    assert len(seen) == 2 * len(TIMES) and torch.equal(seen[0], seen[len(TIMES)]), "of the same first latent"
    before = traces(pipe.controlnet)
    with tome_core.patch(pipe.controlnet) as net:
        net_alone = draw(pipe, **call)
        assert_merged(net)
        both = merged_alone(pipe, **call)
        assert torch.equal(draw(pipe, **call), net_alone), "the UNet's came off and left the ControlNet's on"
    assert differ(plain, unet_alone, net_alone, both)
    assert torch.equal(draw(pipe, **call), plain) and traces(pipe.controlnet) == before


def halves(pipe: Any) -> dict[str, Any]:
    """A mask for each of two image prompts: the left half of the picture, and the right one."""
    side = pipe.unet.config.sample_size * pipe.vae_scale_factor
    left = torch.zeros(1, 1, side, side)
    left[..., : side // 2] = 1
    return {"cross_attention_kwargs": {"ip_adapter_masks": [left, 1 - left]}}


def test_if_the_attention_to_the_prompt_merges_too_an_image_prompts_mask_is_the_reason_to_leave_that_alone(build):
    """A mask is laid over a grid, which merged tokens are not; without one they read the image as they read words."""
    pipe = build()
    call, config = load_image_prompts(pipe, 2), replace(preset("balanced"), merge_crossattn=True)
    masked = {**call, **halves(pipe)}
    with tome_core.patch(pipe, config) as handle:
        unmasked = draw(pipe, **call)
        assert "adapter's mask" not in str(handle.report())
        by_region = draw(pipe, **masked)
        assert "crossattn: an adapter's mask needs every token" in str(handle.report())
        assert torch.equal(draw(pipe, **call), unmasked)
    assert torch.equal(by_region, merged_alone(pipe, **masked)) and differ(unmasked, merged_alone(pipe, **call))
