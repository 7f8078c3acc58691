"""What UNets need beyond the contract: parity with tomesd, odd sizes, levels; and tomesd's way, in which parts of a
block are called with fewer tokens: what does not fit is left alone and named.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import tomesd
import torch
import torch.nn.functional as F
from diffusers.models.attention_processor import AttnProcessor, AttnProcessor2_0
from torch import nn

import tome_core
from benchmarks.sd_block import BasicTransformerBlock, UNet, make_block, make_inputs
from tests import models
from tests.models import BY_NAME, ModelCase, call_case, call_ldm, call_unet, four_levels, ldm, sd15, sdxl, seeded, small
from tests.thoroughness import some_quick
from tome_core import MergeConfig, MergeRule
from tome_core.models.unet_blocks import find_blocks, find_unet

TOMESDS, OURS = MergeConfig(proportional=False), MergeConfig()
INPUTS = make_inputs(8, 2, "cpu", torch.float32)


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


def test_levels_are_found_in_every_shape_of_unet():
    halvings = {case.name: {place.halvings for place in find_blocks(find_unet(case.build()))} for case in models.CASES}
    assert halvings["sd15"] == halvings["ldm_sd1"] == {0, 1}
    assert halvings["sdxl"] == halvings["ldm_latent_diffusion"] == {1, 2}
    assert [place.halvings for place in find_blocks(four_levels())] == [0, 1, 2, 3, 2, 2, 1, 1, 0, 0]
    assert {place.halvings for place in find_blocks(ldm_four_levels())} == {0, 1, 2, 3}
    paths = [place.path for place in find_blocks(models.motion())]
    assert paths and not any("motion_modules" in path for path in paths), "AnimateDiff's attend over time"


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


@pytest.mark.parametrize("processor", [AttnProcessor, AttnProcessor2_0])
def test_a_transformer_that_is_given_a_smaller_picture_than_the_latent_merges_that(processor: type):
    """As with Kohya's deep shrink, which halves the picture on its way through the UNet."""
    model = sd15()
    model.set_attn_processor(processor())
    for transformer in {place.transformer for place in find_blocks(model)}:
        transformer.register_forward_pre_hook(lambda _, args: (F.avg_pool2d(args[0], 2), *args[1:]))
        transformer.register_forward_hook(lambda _, args, out: (F.interpolate(out[0], scale_factor=2.0),))
    with tome_core.patch(model, MergeConfig(side="kv", use_rand=False)) as handle:
        call_case(BY_NAME["sd15"], model)
    assert handle.report().merged_anything and not handle.report().reasons


def test_rules_of_the_mlp_alone_call_an_attention_as_without_them():
    """Neither its projections are wrapped, nor called with fewer tokens or more often."""
    model, calls = small(), []
    layers = [one for name, one in model.mid_block.named_modules() if ".attn1." in name and not list(one.children())]
    before = [sorted(vars(layer)) for layer in layers]
    for layer in layers:
        layer.register_forward_pre_hook(lambda layer, args: calls.append((layer, args[0].shape[1])))
    call_case(BY_NAME["sd15"], model)
    plain = list(calls)
    calls.clear()
    rules = MergeRule(side="kv"), MergeRule(max_downsample=8, merge_attn=False, merge_mlp=True)
    with tome_core.patch(model, MergeConfig(rules=rules)) as handle:
        assert [sorted(vars(layer)) for layer in layers] == before
        call_case(BY_NAME["sd15"], model)
    level = handle.report().levels[1]
    assert level.mlp_tokens and not level.tokens and not level.sized_by
    assert calls == plain and len(plain) == len(layers)


# --- tomesd's way -----------------------------------------------------------------------------------------------------


def reasons(handle: Any) -> dict[str, int]:
    return handle.report().levels[0].reasons


def block_of(unet: UNet) -> BasicTransformerBlock:
    return unet.input_blocks[0][0].transformer_blocks[0]


class Changed(nn.Module):
    """Another program's replacement of the attention; `change` is done to what it returns for fewer tokens."""

    def __init__(self, attention: nn.Module, change: Callable = lambda out: out) -> None:
        super().__init__()
        self.attention, self.change = attention, change

    def forward(self, x, context=None, mask=None, keys=None):
        self.keys = keys  # a word of its own
        out = self.attention(x, context, mask)
        return out if x.shape[1] == 64 else self.change(out)


def refuse(out: torch.Tensor) -> None:
    raise ValueError("all of them, please")


@pytest.mark.parametrize("change, why", [
    (lambda out: out[:, :5], "what it returned cannot be unmerged"),  # windows of its own
    (lambda out: out.transpose(1, 2), "what it returned cannot be unmerged"),
    (lambda out: (out, None), "what it returned cannot be unmerged"),
    (refuse, "refuses merged tokens"),
], ids=["fewer tokens", "transposed", "tuple", "raises"])  # fmt: skip
def test_what_cannot_be_called_with_fewer_tokens_is_left_whole(change, why):
    model = make_block()
    block_of(model).attn1 = Changed(block_of(model).attn1, change)
    expected = model(*INPUTS)
    with tome_core.patch(model, TOMESDS) as handle:
        assert torch.equal(model(*INPUTS), expected) and reasons(handle) == {f"attn: {why}": 1}
    with tome_core.patch(model, OURS) as handle:  # which gives the module all of its tokens
        assert not torch.equal(model(*INPUTS), expected)
        assert reasons(handle) == {} and handle.report().merged_anything


@pytest.mark.parametrize("told, why", [
    ({"mask": lambda x: torch.ones(2, 1, 64)}, "the call has an attention mask"),
    ({"context": lambda x: torch.cat([x, x], 1)}, "keys and values are not the picture's tokens"),
    ({"keys": lambda x: "theirs"}, ""),  # it is passed on
], ids=["mask", "bank of keys", "a word of its own"])  # fmt: skip
def test_a_call_that_does_not_fit_is_left_alone_and_named(told, why):
    model = make_block()
    block_of(model).attn1 = attention = Changed(block_of(model).attn1)
    attention.register_forward_pre_hook(
        lambda _, args, kwargs: (args, kwargs | {name: make(args[0]) for name, make in told.items()}),
        with_kwargs=True)  # fmt: skip
    expected = model(*INPUTS)
    with tome_core.patch(model, TOMESDS) as handle:
        assert torch.equal(model(*INPUTS), expected) == bool(why)
        assert reasons(handle) == ({f"attn: {why}": 1} if why else {})
    assert attention.keys == ("theirs" if "keys" in told else None)


@pytest.mark.parametrize("config", [TOMESDS, OURS], ids=["tomesd's way", "ours"])
def test_a_block_called_by_itself_is_left_alone_without_a_word_and_maps_are_kept_if_they_are_asked_for(config):
    """A block's own call is none of the UNet's, and nobody knows whose it is."""
    model, tokens = make_block(), INPUTS[0].flatten(2).transpose(1, 2)
    expected = block_of(model)(tokens, INPUTS[2])
    with tome_core.patch(model, config) as handle:
        assert torch.equal(block_of(model)(tokens, INPUTS[2]), expected)
        assert reasons(handle) == {} and handle.report().calls == 0
        model(*INPUTS)
        assert handle.maps() == {}
        handle.keep_maps()
        model(*INPUTS)
        kept = handle.maps()[0]
        assert kept.grid[:2] == (8, 8) and kept.group.shape == (2, 64) and kept.group.device.type == "cpu"
        assert int(kept.group.max()) + 1 == kept.num_groups == 32
