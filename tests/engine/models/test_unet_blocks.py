"""What single UNets need beyond the contract: parity with tomesd, odd sizes, levels, and sgm's real class."""

from __future__ import annotations

import copy
import importlib
import logging
import os
import sys

import pytest
import tomesd
import torch
from torch import nn

import tome_core
from tests import models
from tests.doubles import LatentDiffusionDouble
from tests.models import BY_NAME, TEXT, ModelCase, call_case, call_ldm, call_unet, four_levels, ldm, sdxl, seeded
from tests.thoroughness import some_quick
from tome_core import MergeConfig
from tome_core.models.unet_blocks import find_blocks, find_unet


@pytest.mark.parametrize("name", ["sd15", "sd2", "inpainting", "ldm_wrapped"])
@pytest.mark.parametrize("ratio", some_quick([0.5, 0.25, 0.75]))
@pytest.mark.parametrize("more", [{}, {"merge_crossattn": True, "merge_mlp": True}, {"sx": 4, "sy": 4}], ids=str)
def test_a_whole_unet_gives_tomesds_picture(name: str, ratio: float, more: dict):
    """With fixed destinations; random ones are drawn otherwise."""
    case = BY_NAME[name]
    ours, theirs = case.build(), case.build()
    settings = {"ratio": ratio, "max_downsample": 1, "use_rand": False, **more}
    tomesd.apply_patch(theirs, **settings)
    tome_core.apply_patch(ours, **settings)
    vanilla, picture, expected = (call_case(case, model, height=24) for model in (case.build(), ours, theirs))
    scale = expected.abs().max()
    assert (picture - expected).abs().max() <= 1e-4 * scale
    assert (picture - vanilla).abs().max() > 1e-2 * scale


@seeded
def ldm_four_levels() -> nn.Module:
    return ldm(attention_resolutions=(1, 2, 4, 8), channel_mult=(1, 1, 1, 1), num_heads=2)


ODD = [(1, 16), (16, 1), (1, 1), (2, 3), (33, 97), (8, 72), (65, 63), (63, 65), (2, 2), (32, 159), (35, 33)]


@pytest.mark.parametrize("size", some_quick(ODD, 7), ids=str)
@pytest.mark.parametrize("cell", some_quick([2, 8, 4], 2))
@pytest.mark.parametrize("build, call", [(four_levels, call_unet), (ldm_four_levels, call_ldm)])
def test_odd_latents_merge_at_every_level_wherever_the_model_takes_them(build, call, size, cell):
    """tomesd works a grid out from the number of tokens, and fails at 104 of 16,384 sizes at /8."""
    (height, width), case, model = size, ModelCase("", build, call), build()
    try:
        vanilla = call_case(case, model, 1, height, width)
    except (RuntimeError, ValueError) as error:
        assert build is ldm_four_levels  # its skip connections do not fit at sizes that do not halve
        tome_core.apply_patch(model, max_downsample=8)
        with pytest.raises(type(error)):
            call_case(case, model, 1, height, width)
        return
    tome_core.apply_patch(model, max_downsample=8, sx=cell, sy=cell, merge_mlp=True)
    merged = call_case(case, model, 1, height, width)
    assert merged.shape == vanilla.shape and merged.isfinite().all()
    assert torch.equal(merged, vanilla) == (height * width == 1)
    for level in tome_core.report(model).levels:
        assert all(before == height * width for before, *_ in (*level.tokens, *level.mlp_tokens))
        height, width = -(-height // 2), -(-width // 2)
        assert level.calls_merged or level.reasons == {
            f"{part}: the grid is too small for the ratio to remove a token": level.blocks for part in ("attn", "mlp")
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
    found = {case.name: [p.halvings for p in find_blocks(find_unet(case.build()))] for case in models.CASES}
    assert set(found["sd15"]) == {0, 1} and set(found["ldm_sd1"]) == {0, 1}
    assert set(found["sdxl"]) == {1, 2} and set(found["ldm_latent_diffusion"]) == {1, 2}
    assert [p.halvings for p in find_blocks(four_levels())] == [0, 1, 2, 3, 2, 2, 1, 1, 0, 0]
    assert sorted({p.halvings for p in find_blocks(ldm_four_levels())}) == [0, 1, 2, 3]


def test_sdxl_merges_by_default_and_says_where_it_cannot(caplog):
    model = sdxl()
    with caplog.at_level(logging.WARNING):
        tome_core.apply_patch(model)
    assert not caplog.records
    call_case(BY_NAME["sdxl"], model)
    assert "latent /2: 64 tokens -> 32, 75% left out" in str(tome_core.report(model))
    vanilla = call_case(BY_NAME["sdxl"], sdxl())
    with caplog.at_level(logging.WARNING), tome_core.patch(model, MergeConfig(max_downsample=1)) as handle:
        assert torch.equal(call_case(BY_NAME["sdxl"], model), vanilla)
    assert len(caplog.records) == 1 and "nothing will merge" in caplog.text and "/2, /4" in caplog.text
    assert "nothing merged: no rule reaches" in str(handle.report()) and not handle.report().levels[0].covered


def test_a_report_is_the_same_from_outside_and_inside():
    model = models.ldm_wrapped()
    tome_core.apply_patch(model, ratio=0.9)
    call_case(BY_NAME["ldm_wrapped"], model)
    inner = model.model.diffusion_model
    assert tome_core.report(model) == tome_core.report(inner) == tome_core.report(model.model)
    text = str(tome_core.report(inner))
    assert "settings: ratio=0.9, " in text and "over the cap 0.75" in text and "Token merging: 1 model call, " in text
    tome_core.remove_patch(inner)
    assert not tome_core.report(model).patched


def test_a_pipeline_and_its_unet_are_the_same_model():
    class Pipeline:
        unet = models.sd15()

    pipe = tome_core.apply_patch(Pipeline())
    assert tome_core.report(pipe.unet).patched
    tome_core.remove_patch(pipe.unet)
    assert not tome_core.report(pipe).patched


@pytest.fixture
def sgm_attention():
    """sgm's own block, from the checkout of Stability-AI/generative-models that SGM_DIR names."""
    folder = os.environ.get("SGM_DIR")
    if not folder:
        pytest.skip("SGM_DIR does not name a checkout of Stability-AI/generative-models")
    # only the two modules: the package itself imports pytorch-lightning
    package = type(sys)("sgm")
    package.__path__ = [os.path.join(folder, "sgm")]
    modules = type(sys)("sgm.modules")
    modules.__path__ = [os.path.join(folder, "sgm", "modules")]
    before = dict(sys.modules)
    sys.modules.update({"sgm": package, "sgm.modules": modules})
    try:
        yield importlib.import_module("sgm.modules.attention")
    finally:
        for name in set(sys.modules) - set(before):
            del sys.modules[name]


@pytest.mark.filterwarnings("ignore")  # sgm's own
@pytest.mark.parametrize("extra", [False, True])
def test_sgms_real_block_works(sgm_attention, extra: bool, monkeypatch):
    """The block as SDXL uses it in the webui: inside its own transformer, checkpointing itself, in LDM's UNet."""
    def make(width: int) -> nn.Module:
        return sgm_attention.BasicTransformerBlock(width, 4, width // 4, context_dim=TEXT, attn_mode="softmax")

    build = seeded(lambda: LatentDiffusionDouble(ldm(), make))
    case = ModelCase("sgm", build, call_ldm)
    model = build()
    vanilla = call_case(case, model)
    tome_core.apply_patch(model, merge_crossattn=extra, merge_mlp=extra)
    merged = call_case(case, model)
    assert (merged - vanilla).abs().max() > 1e-3
    assert tome_core.report(model).levels[0].calls_merged == 3 * (3 if extra else 1)
    assert torch.equal(call_case(case, copy.deepcopy(model)), merged)
    tome_core.remove_patch(model)
    assert torch.equal(call_case(case, model), vanilla)
    models.merge_with_self(monkeypatch)
    tome_core.apply_patch(model, merge_crossattn=extra, merge_mlp=extra)
    assert torch.equal(call_case(case, model), vanilla)
    block = find_blocks(find_unet(model))[0].block
    tokens, text = torch.randn(2, 6, block.norm1.weight.shape[0]), torch.randn(2, 3, TEXT)
    kwargs = {"additional_tokens": torch.randn(2, 2, tokens.shape[-1])}
    assert block._forward(tokens, text, **kwargs).shape == tokens.shape
