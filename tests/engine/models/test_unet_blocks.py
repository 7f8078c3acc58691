"""What single UNets need beyond the contract: parity with tomesd, odd sizes, levels."""

from __future__ import annotations

import logging

import pytest
import tomesd
import torch
from torch import nn

import tome_core
from tests import models
from tests.models import BY_NAME, ModelCase, call_case, call_ldm, call_unet, four_levels, ldm, sdxl, seeded
from tests.thoroughness import some_quick
from tome_core import MergeConfig
from tome_core.models.unet_blocks import find_blocks, find_unet


@pytest.mark.parametrize("name", some_quick(["sd15", "ldm_wrapped", "sd2"], 2))
@pytest.mark.parametrize("more", [{}, {"merge_crossattn": True, "merge_mlp": True}, {"sx": 4, "sy": 4}], ids=str)
def test_a_whole_unet_gives_tomesds_picture(name: str, more: dict):
    """With fixed destinations; random ones are drawn otherwise."""
    case = BY_NAME[name]
    vanilla = call_case(case, case.build(), height=24)
    for ratio in (0.5, 0.75):
        ours, theirs = case.build(), case.build()
        settings = {"ratio": ratio, "max_downsample": 1, "use_rand": False, **more}
        tomesd.apply_patch(theirs, **settings)
        tome_core.apply_patch(ours, **settings)
        picture, expected = (call_case(case, model, height=24) for model in (ours, theirs))
        scale = expected.abs().max()
        assert (picture - expected).abs().max() <= 1e-4 * scale
        assert (picture - vanilla).abs().max() > 1e-2 * scale


@seeded
def ldm_four_levels() -> nn.Module:
    return ldm(attention_resolutions=(1, 2, 4, 8), channel_mult=(1, 1, 1, 1), num_heads=2)


ODD = [(1, 16), (16, 1), (1, 1), (2, 2), (2, 3), (8, 72), (35, 33)]
HALVED = [(8, 16), (8, 72), (16, 24)]  # at others an LDM UNet's skip connections do not fit


@pytest.mark.parametrize("build, call, sizes", [(four_levels, call_unet, ODD), (ldm_four_levels, call_ldm, HALVED)],
                         ids=["diffusers", "LDM"])  # fmt: skip
@pytest.mark.parametrize("cell", some_quick([2, 8]))
def test_latents_of_every_size_merge_at_every_level(build, call, sizes, cell: int):
    """tomesd works a grid out from the number of tokens, and fails at 104 of 16,384 sizes at /8."""
    case, model = ModelCase("", build, call), build()
    for height, width in sizes:
        tome_core.remove_patch(model)
        vanilla = call_case(case, model, 1, height, width)
        tome_core.apply_patch(model, max_downsample=8, sx=cell, sy=cell, merge_mlp=True)
        merged = call_case(case, model, 1, height, width)
        assert merged.shape == vanilla.shape and merged.isfinite().all()
        assert torch.equal(merged, vanilla) == (height * width == 1)
        for level in tome_core.report(model).levels:
            assert all(before == height * width for before, *_ in (*level.tokens, *level.mlp_tokens))
            height, width = -(-height // 2), -(-width // 2)
            assert level.calls_merged or level.reasons == {
                f"{part}: the grid is too small for the ratio to remove a token": level.blocks
                for part in ("attn", "mlp")
            }


def test_animatediff_merges_in_pictures_and_not_over_time():
    model = models.motion()
    places = find_blocks(model)
    assert places and not any("motion_modules" in place.path for place in places)
    assert any("motion_modules" in name for name, _ in model.named_modules())
    tome_core.apply_patch(model, max_downsample=8)
    call_case(BY_NAME["motion"], model)
    assert all(level.calls_merged == level.blocks and not level.reasons for level in tome_core.report(model).levels)


def test_levels_are_found_in_every_shape_of_unet():
    halvings = {case.name: {place.halvings for place in find_blocks(find_unet(case.build()))} for case in models.CASES}
    assert halvings["sd15"] == halvings["ldm_sd1"] == {0, 1}
    assert halvings["sdxl"] == halvings["ldm_latent_diffusion"] == {1, 2}
    assert [place.halvings for place in find_blocks(four_levels())] == [0, 1, 2, 3, 2, 2, 1, 1, 0, 0]
    assert {place.halvings for place in find_blocks(ldm_four_levels())} == {0, 1, 2, 3}


def test_sdxl_merges_by_default_and_says_where_it_cannot(caplog):
    model = sdxl()
    vanilla = call_case(BY_NAME["sdxl"], model)
    with caplog.at_level(logging.WARNING):
        tome_core.apply_patch(model)
    assert not caplog.records
    call_case(BY_NAME["sdxl"], model)
    assert "latent /2: 64 tokens -> 32, 75% left out" in str(tome_core.report(model))
    with caplog.at_level(logging.WARNING), tome_core.patch(model, MergeConfig(max_downsample=1)) as handle:
        assert torch.equal(call_case(BY_NAME["sdxl"], model), vanilla)
    assert len(caplog.records) == 1 and "nothing will merge" in caplog.text and "/2, /4" in caplog.text
    assert "nothing merged: no rule reaches" in str(handle.report()) and not handle.report().levels[0].covered
