"""Pipelines prompted by images (IP-Adapter) in the ways people use them: merged all along, and otherwise as ever.

That a plain call merges and repeats, that a scale may change between pictures and within one and that an adapter may
come and go is held beside other uses, in `test_one_line.py` and `test_guided_otherwise.py`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import diffusers
import pytest
import torch

import tome_core
from tests.image_prompts import load_image_prompts
from tests.pipelines import IMAGE_TIMES, an_image, differ, draw, every_kind, merged_alone
from tests.thoroughness import some_quick
from tome_core import preset


def halves(pipe: Any) -> list[torch.Tensor]:
    """A mask for each of two adapters: the left half of the picture, and the right one."""
    side = pipe.unet.config.sample_size * pipe.vae_scale_factor
    left = torch.zeros(1, 1, side, side)
    left[..., : side // 2] = 1
    return [left, 1 - left]


def masked(pipe: Any, masks: list[torch.Tensor], call: dict[str, Any]) -> dict[str, Any]:
    return {**call, "cross_attention_kwargs": {"ip_adapter_masks": masks}}


@every_kind
def test_an_image_prompt_that_weighs_nothing_changes_no_bit_of_a_merged_picture(build, kind: str):
    merged, pipe = merged_alone(build(kind)), build(kind)
    call = load_image_prompts(pipe)
    plain, prompted = draw(pipe, **call), merged_alone(pipe, **call)
    pipe.set_ip_adapter_scale(0.0)
    assert torch.equal(merged_alone(pipe, **call), merged)
    pipe.set_ip_adapter_scale(1.0)
    assert torch.equal(draw(pipe, **call), plain) and differ(plain, prompted, merged)


@every_kind
def test_two_images_each_in_its_region_see_every_token_of_it(build, kind: str):
    pipe = build(kind)
    call = load_image_prompts(pipe, 2)
    masks, seen = halves(pipe), []
    for name, module in pipe.unet.named_modules():
        if name.endswith("attn2"):
            module.register_forward_pre_hook(lambda _module, args: seen.append(args[0].shape[1]))
    plain, grids = draw(pipe, **masked(pipe, masks, call)), [*seen]
    seen.clear()
    merged = merged_alone(pipe, **masked(pipe, masks, call))
    assert seen == grids
    exchanged = merged_alone(pipe, **masked(pipe, masks[::-1], call))
    everywhere = merged_alone(pipe, **call)
    assert differ(plain, merged, exchanged, everywhere)
    assert torch.equal(merged_alone(pipe, **masked(pipe, masks, call)), merged)
    assert torch.equal(draw(pipe, **masked(pipe, masks, call)), plain)


def test_where_the_attention_to_the_prompt_merges_too_a_mask_is_the_reason_to_leave_that_alone(build):
    """A mask is laid over a grid, which merged tokens are not; without one they read the image as they read words."""
    pipe = build()
    call, config = load_image_prompts(pipe, 2), replace(preset("balanced"), merge_crossattn=True)
    plain = draw(pipe, **call)
    with tome_core.patch(pipe, config) as handle:
        unmasked = draw(pipe, **call)
        assert "adapter's mask" not in str(handle.report())
        by_region = draw(pipe, **masked(pipe, halves(pipe), call))
        assert "crossattn: an adapter's mask needs every token" in str(handle.report())
        assert torch.equal(draw(pipe, **call), unmasked)
    assert torch.equal(by_region, merged_alone(pipe, **masked(pipe, halves(pipe), call)))
    assert differ(plain, unmasked, merged_alone(pipe, **call)) and torch.equal(draw(pipe, **call), plain)


def _image_to_image(pipe: Any) -> tuple[Any, dict[str, Any]]:
    return diffusers.AutoPipelineForImage2Image.from_pipe(pipe), {}


def _inpainting(pipe: Any) -> tuple[Any, dict[str, Any]]:
    return diffusers.AutoPipelineForInpainting.from_pipe(pipe), {"mask_image": halves(pipe)[0]}


@every_kind
@pytest.mark.parametrize("make", some_quick([_image_to_image, _inpainting]))
def test_an_image_that_prompts_beside_one_that_is_redrawn(build, kind: str, make: Any):
    pipe = build(kind)
    prompt, (made, call) = load_image_prompts(pipe), make(pipe)
    call |= {**prompt, "image": an_image(pipe), "strength": 0.8, "timesteps": IMAGE_TIMES}
    plain, merged = draw(made, **call), merged_alone(made, **call)
    made.set_ip_adapter_scale(0.0)
    assert differ(plain, merged, merged_alone(made, **call))
    made.set_ip_adapter_scale(1.0)
    assert torch.equal(merged_alone(made, **call), merged) and torch.equal(draw(made, **call), plain)
