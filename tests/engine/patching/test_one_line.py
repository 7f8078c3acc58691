"""`tome_core.patch(pipe)`: one line puts a preset on a diffusers pipeline, one takes it off, whatever it draws between.

Real pipelines with random weights.
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import diffusers
import pytest
import torch

import tome_core
from tests import pipelines
from tests.pipeline_uses import USES
from tests.pipelines import IMAGE_TIMES, an_image, assert_merged, differ, draw, every_kind, every_preset, merged_alone
from tests.threads import at_once
from tests.traces import traces
from tome_core.patching import handle_on

# --- the line itself -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@every_kind
@every_preset
def test_one_line_merges_and_another_brings_every_bit_back(build, kind: str, name: str):
    pipe = build(kind)
    before, plain = traces(pipe.unet), draw(pipe, output_type="pt")
    tome_core.patch(pipe, name)
    merged = draw(pipe, output_type="pt")
    assert_merged(handle_on(pipe.unet))
    tome_core.remove_patch(pipe)
    assert differ(plain, merged) and torch.equal(draw(pipe, output_type="pt"), plain)
    assert traces(pipe.unet) == before


def test_a_scheduler_that_is_exchanged_afterwards_changes_nothing(build):
    """As nearly everybody does, and some programs for every picture."""
    pipe, other = build(), build()
    handle = tome_core.patch(pipe)
    for number in range(2):
        pipe.scheduler = other.scheduler = diffusers.UniPCMultistepScheduler.from_config(pipe.scheduler.config)
        steps = {"timesteps": None, "num_inference_steps": 12}
        assert torch.equal(draw(pipe, seed=number, **steps), merged_alone(other, seed=number, **steps))
    assert_merged(handle)


# --- several pipelines, and threads ----------------------------------------------------------------------------------


def image_to_image(pipe: Any) -> tuple[Any, dict[str, Any]]:
    """A pipeline of the same modules, with a scheduler of its own, and what its call needs."""
    sibling = diffusers.AutoPipelineForImage2Image.from_pipe(pipe)
    sibling.scheduler = type(pipe.scheduler).from_config(pipe.scheduler.config)
    return sibling, {"image": an_image(pipe), "strength": 0.8, "timesteps": IMAGE_TIMES}


def several(count: int, *args: Any, **more: Any) -> list[torch.Tensor]:
    return [draw(*args, **more) for _ in range(count)]


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
    works = partial(several, 2, text), partial(several, 2, image, **call)
    for both in ([work() for work in works], at_once(*works)):
        for expected, pictures in zip(alone, both, strict=True):
            assert all(torch.equal(one, expected) for one in pictures)
    assert_merged(handle)
    assert differ(*plain, *alone)
    tome_core.remove_patch(image)
    assert torch.equal(draw(text), plain[0]) and torch.equal(draw(image, **call), plain[1])


@pytest.mark.slow
def test_pipelines_of_their_own_may_draw_at_once(build):
    pipes = [build("sd15"), build("sdxl"), build("sd15")]
    alone = [merged_alone(build("sd15"), "balanced"), merged_alone(build("sdxl"), "fast"), draw(pipes[2])]
    handles = [tome_core.patch(pipes[0]), tome_core.patch(pipes[1], "fast")]
    both = at_once(*(partial(several, 2, pipe) for pipe in pipes))
    for expected, pictures in zip(alone, both, strict=True):
        assert all(torch.equal(one, expected) for one in pictures)
    for handle in handles:
        assert_merged(handle)


# --- SD.Next ---------------------------------------------------------------------------------------------------------


def test_the_pages_file_for_sdnext_patches_what_is_loaded(build, monkeypatch):
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


# --- other pipelines, other calls ------------------------------------------------------------------------------------


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
