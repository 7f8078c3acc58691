"""What UNets need beyond the contract: parity with tomesd, odd sizes, levels, dtypes and devices."""

import inspect
import logging
from copy import deepcopy
from typing import Any
from unittest.mock import Mock

import pytest
import tomesd
import torch
import torch.nn.functional as F
from torch import nn

import tome_core
from tests.small_models.families import MODELS
from tests.small_models.unets import call_ldm, call_unet, four_levels, inputs, ldm, on_small, sdxl, seeded, small
from tests.thoroughness import some_quick
from tome_core import MergeConfig
from tome_core.attention.merged import BIAS
from tome_core.models import unet
from tome_core.models.unet_blocks import find_blocks

SD15, BALANCED = MODELS["sd15"], on_small("balanced")


@pytest.mark.parametrize("name", some_quick(["sd15", "ldm_wrapped", "sd2"], 2))
@pytest.mark.parametrize("more", [{}, {"merge_crossattn": True, "merge_mlp": True}, {"sx": 4, "sy": 2}], ids=str)
def test_a_whole_unet_gives_tomesds_picture(name: str, more: dict):
    """Destinations are fixed, because tomesd draws random ones in another way."""
    case = MODELS[name]
    vanilla = case.call(case.build(), height=24)
    for ratio in (0.5, 0.75):
        ours, tomesds = case.build(), case.build()
        settings = {"ratio": ratio, "max_downsample": 1, "use_rand": False, **more}
        tomesd.apply_patch(tomesds, **settings)
        tome_core.apply_patch(ours, **settings)
        picture, expected = (case.call(model, height=24) for model in (ours, tomesds))
        scale = expected.abs().max()
        assert (picture - expected).abs().max() <= 1e-4 * scale
        assert (picture - vanilla).abs().max() > 1e-2 * scale


def test_arguments_that_tomesd_has_too_have_its_defaults():
    theirs, ours = (inspect.signature(module.apply_patch).parameters for module in (tomesd, tome_core))
    assert {name: ours[name].default for name in theirs if ours[name].default != theirs[name].default} == {
        "max_downsample": None}, "chosen by the model"  # fmt: skip


@seeded
def ldm_four_levels() -> nn.Module:
    return ldm(attention_resolutions=(1, 2, 4, 8), channel_mult=(1, 1, 1, 1), num_heads=2)


ODD = [(1, 16), (16, 1), (1, 1), (2, 2), (2, 3), (8, 72), (35, 33)]
HALVED = [(8, 16), (8, 72), (16, 24)]  # at other sizes an LDM UNet's skip connections do not fit


@pytest.mark.parametrize("build, call, sizes", [(four_levels, call_unet, ODD), (ldm_four_levels, call_ldm, HALVED)],
                         ids=["diffusers", "LDM"])  # fmt: skip
@pytest.mark.parametrize("cell", some_quick([2, 8]))
def test_latents_of_every_size_merge_at_every_level(build, call, sizes, cell: int):
    """tomesd works a grid out from the number of tokens, and fails at 104 of 16,384 sizes at /8."""
    case, model = SD15._replace(build=build, forward=call), build()
    for height, width in sizes:
        tome_core.remove_patch(model)
        vanilla = case.call(model, 1, height, width)
        tome_core.apply_patch(model, max_downsample=8, sx=cell, sy=cell, merge_mlp=True)
        merged = case.call(model, 1, height, width)
        assert merged.shape == vanilla.shape and merged.isfinite().all()
        assert torch.equal(merged, vanilla) == (height * width == 1)
        for level in tome_core.report(model).levels:
            assert all(before == height * width for before, *_ in (*level.tokens, *level.mlp_tokens))
            height, width = -(-height // 2), -(-width // 2)
            assert level.calls_merged or level.reasons == {
                f"{part}: the picture is too small for this ratio to merge a token": level.blocks
                for part in ("attn", "mlp")}  # fmt: skip


def test_sdxl_merges_by_default_and_says_where_it_cannot(caplog):
    model = sdxl()
    vanilla = MODELS["sdxl"].call(model)
    with caplog.at_level(logging.WARNING):
        tome_core.apply_patch(model)
    assert not caplog.records
    MODELS["sdxl"].call(model)
    assert "latent /2: 64 tokens in 32 groups" in str(tome_core.report(model))
    with caplog.at_level(logging.WARNING), tome_core.patch(model, MergeConfig(max_downsample=1)) as handle:
        assert torch.equal(MODELS["sdxl"].call(model), vanilla)
    assert len(caplog.records) == 1 and "nothing will merge" in caplog.text and "/2, /4" in caplog.text
    assert "nothing merged: no rule reaches" in str(handle.report()) and not handle.report().levels[0].covered


def test_a_transformer_that_is_given_a_smaller_picture_than_the_latent_merges_that():
    """Kohya's deep shrink halves the picture inside the UNet."""
    model = small()
    for transformer in {place.transformer for place in find_blocks(model)}:
        transformer.register_forward_pre_hook(lambda _, args: (F.avg_pool2d(args[0], 2), *args[1:]))
        transformer.register_forward_hook(lambda _, args, out: (F.interpolate(out[0], scale_factor=2.0),))
    with tome_core.patch(model, MergeConfig(side="kv", use_rand=False)) as handle:
        SD15.call(model)
    assert handle.report().merged_anything and not handle.report().reasons


def test_blocks_are_searched_once_for_a_patch_and_again_whenever_it_is_put_on(monkeypatch):
    """Blocks may be exchanged while a patch is off its model."""
    model = sdxl()
    monkeypatch.setattr(unet, "find_blocks", search := Mock(side_effect=find_blocks))
    with torch.no_grad(), tome_core.patch(model, BALANCED) as handle:
        assert search.call_count == 2
        MODELS["sdxl"].call(model)
        before, _ = handle.report(), handle.uninstall()
        blocks = find_blocks(model)[-1].transformer.transformer_blocks
        blocks[0] = deepcopy(blocks[0])
        handle.reset_counts()
        handle.install()
        assert search.call_count == 3 and handle.adapter.places == find_blocks(model)
        MODELS["sdxl"].call(model)
        assert handle.report() == before and before.merged_anything


@pytest.mark.parametrize("timestep", [100, torch.tensor(100)], ids=repr)
@pytest.mark.parametrize("config", [BALANCED, MergeConfig(ratio=0.5)], ids=["balanced", "together"])
def test_the_default_dtype_and_device_change_no_bit(config: MergeConfig, timestep: Any):
    """Programs set the device to "cuda" and leave a model on the CPU; "meta" is a device that is everywhere."""
    (x, text), model = inputs(4, 1, 16, 16), small()

    def draw() -> torch.Tensor:
        with torch.no_grad(), tome_core.patch(model, config):
            return call_unet(model, x, timestep, text)

    expected, before = draw(), torch.get_default_dtype()
    try:
        for dtype in (torch.float64, torch.bfloat16):
            torch.set_default_dtype(dtype)
            assert torch.equal(draw(), expected)
    finally:
        torch.set_default_dtype(before)
    with torch.device("meta"):
        assert torch.equal(draw(), expected)


def test_weights_that_are_stored_in_half_precision_merge_as_hard():
    """In diffusers' layerwise casting each layer casts its weights for a call, so their dtype is not the inputs'."""
    model = small()
    if not hasattr(model, "enable_layerwise_casting"):
        pytest.skip("this diffusers has no layerwise casting")
    model.enable_layerwise_casting(storage_dtype=torch.float16, compute_dtype=torch.float32)
    with tome_core.patch(model, BALANCED) as handle:
        SD15.call(model, 1, timestep=100)
    level = handle.report().levels[0]
    assert level.tokens == ((256, 256, 36),) and level.sized_by == {BIAS: 3}
