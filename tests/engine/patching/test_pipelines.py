"""`tome_core.patch(pipe)`: one line puts a preset on a diffusers pipeline, one takes it off, whatever it draws between.

Real pipelines with random weights. That a LoRA may come and go at any time is `tests/beside`'s.
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import diffusers
import pytest
import torch

import tome_core
from tests.image_prompts import load_image_prompts
from tests.pipeline_uses import USES
from tests.pipelines import IMAGE_TIMES, an_image, assert_merged, differ, draw, every_kind, merged_alone
from tests.traces import traces
from tome_core import preset
from tome_core.patching import handle_on, layout_of


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


@pytest.mark.slow
@every_kind
def test_pipelines_that_share_a_unet_share_the_patch(build, kind: str):
    """But for matches, which serve the steps of the pipeline that was patched."""
    text = build(kind)
    image, call = diffusers.AutoPipelineForImage2Image.from_pipe(text), {"strength": 0.8, "timesteps": IMAGE_TIMES}
    image.scheduler, call["image"] = copy.deepcopy(text.scheduler), an_image(text)
    plain = draw(text), draw(image, **call)
    keeps_nothing = replace(preset("balanced", layout_of(image)), keep=0.0)
    alone = merged_alone(text), merged_alone(image, keeps_nothing, **call)
    handle = tome_core.patch(text)
    for _ in range(2):
        assert torch.equal(draw(text), alone[0]) and torch.equal(draw(image, **call), alone[1])
    assert_merged(handle)
    tome_core.remove_patch(image)
    assert torch.equal(draw(text), plain[0]) and torch.equal(draw(image, **call), plain[1])
    assert differ(*plain, *alone)


def test_a_controlnet_is_merged_if_it_is_asked_for_and_left_alone_if_not(build, load):
    """By a patch of its own, beside the UNet's or alone, and taken off alone."""
    pipe, call = USES["controlnet"](build(), load)
    before, plain, unet_alone = traces(pipe.controlnet), draw(pipe, **call), merged_alone(pipe, **call)
    with tome_core.patch(pipe):
        assert traces(pipe.controlnet) == before
    with tome_core.patch(pipe.controlnet) as net:
        net_alone = draw(pipe, **call)
        assert_merged(net)
        both = merged_alone(pipe, **call)
        assert torch.equal(draw(pipe, **call), net_alone), "the UNet's came off and left the ControlNet's on"
    assert differ(plain, unet_alone, net_alone, both)
    assert torch.equal(draw(pipe, **call), plain) and traces(pipe.controlnet) == before


def test_if_the_attention_to_the_prompt_merges_too_an_image_prompts_mask_is_the_reason_to_leave_that_alone(build):
    """A mask is laid over a grid, which merged tokens are not; without one they read the image as they read words."""
    pipe = build()
    side = pipe.unet.config.sample_size * pipe.vae_scale_factor
    left = torch.zeros(1, 1, side, side)
    left[..., : side // 2] = 1
    call = load_image_prompts(pipe, 2)
    masked = {**call, "cross_attention_kwargs": {"ip_adapter_masks": [left, 1 - left]}}
    with tome_core.patch(pipe, replace(preset("balanced"), merge_crossattn=True)) as handle:
        draw(pipe, **call)
        assert "adapter's mask" not in str(handle.report())
        by_region = draw(pipe, **masked)
        assert "crossattn: an adapter's mask needs every token" in str(handle.report())
    assert torch.equal(by_region, merged_alone(pipe, **masked))
