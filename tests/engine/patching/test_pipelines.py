"""`tome_core.patch(pipe)` puts a preset on a real pipeline, with random weights, for all kinds of pictures."""

import copy
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import diffusers
import pytest
import torch

import tome_core
from tests.small_models.sd_pipelines import TIMES, draw
from tests.small_models.unets import fixed
from tests.watching.traces import traces
from tome_core import preset
from tome_core.patching import patch_on

TOKENS = 1024


def merged_alone(pipe: Any, **more: Any) -> torch.Tensor:
    """The picture of a patch that has seen no other."""
    with tome_core.patch(pipe) as handle:
        picture = draw(pipe, **more)
    assert_merged(handle)
    return picture


def assert_merged(handle: Any) -> None:
    """Assert that every call of the finest level merged, as much as the default preset merges in late steps."""
    finest = handle.report().levels[0]
    assert finest.calls_merged and not finest.reasons and finest.work_saved > 0.5
    most = TOKENS * (1 - preset("balanced").rules[0].ratio)
    assert all(before == TOKENS and keys <= most for before, _, keys in finest.tokens)


def an_image() -> torch.Tensor:
    return torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(7))


# other uses than drawing from words, by the arguments of the pipeline's call
USES = {"callback": {"callback_on_step_end": lambda *given: {"latents": given[-1]["latents"] * 0.9},
                     "callback_on_step_end_tensor_inputs": ["latents"]}, "without guidance": {"guidance_scale": 1.0},
        "three pictures": {"num_images_per_prompt": 3}, "scale": {"cross_attention_kwargs": {"scale": 0.4}},
        "image to image": {"image": an_image(), "strength": 0.8, "timesteps": [951, *TIMES]}}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("use", USES)
def test_every_call_merges_and_is_the_same_again(build, use: str):
    pipe, call = build(), USES[use]
    if "image" in call:
        pipe = diffusers.AutoPipelineForImage2Image.from_pipe(pipe)
    plain = draw(pipe, **call)
    handle = tome_core.patch(pipe)
    first = draw(pipe, **call)
    draw(pipe, **{**call, "guidance_scale": 2.0}, seed=5)
    assert torch.equal(draw(pipe, **call), first) and torch.equal(merged_alone(pipe, **call), first)
    assert_merged(handle)
    tome_core.remove_patch(pipe)
    assert not torch.equal(plain, first) and torch.equal(draw(pipe, **call), plain)


def test_the_pages_file_for_sdnext_patches_what_is_loaded_whatever_sampler_comes(build, monkeypatch):
    """SD.Next's scripts register a function for every pipeline that it loads; each picture has its own sampler."""
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
    for _ in range(2):
        pipe.scheduler = copy.deepcopy(default)
        assert torch.equal(draw(pipe), merged)
        pipe.scheduler = diffusers.UniPCMultistepScheduler.from_config(default.config)
        draw(pipe, seed=5, timesteps=None, num_inference_steps=4)
    assert_merged(patch_on(pipe.unet))


def test_a_controlnet_is_merged_if_it_is_asked_for_and_left_alone_if_not(build):
    """A ControlNet has a patch of its own, with or without the UNet's, and that patch comes off by itself."""
    pipe = build()
    net = fixed(diffusers.ControlNetModel.from_unet(pipe.unet, conditioning_embedding_out_channels=(8, 8)))
    pipe = diffusers.StableDiffusionControlNetPipeline.from_pipe(pipe, controlnet=net)
    call = {"image": an_image(), "controlnet_conditioning_scale": 0.7}
    before, plain, unet_alone = traces(net), draw(pipe, **call), merged_alone(pipe, **call)
    with tome_core.patch(pipe):
        assert traces(net) == before
    with tome_core.patch(net) as handle:
        net_alone = draw(pipe, **call)
        assert_merged(handle)
        both = merged_alone(pipe, **call)
        assert torch.equal(draw(pipe, **call), net_alone), "the UNet's came off and left the ControlNet's on"
    pictures = (plain, unet_alone, net_alone, both)
    assert not any(torch.equal(picture, other) for i, picture in enumerate(pictures) for other in pictures[:i])
    assert torch.equal(draw(pipe, **call), plain) and traces(net) == before
