"""Calls of UNets: how large a picture is, and attentions that are called as without a patch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from diffusers.models.attention_processor import AttnProcessor, AttnProcessor2_0
from torch import nn

import tome_core
from tests.beside.ways import ByProducts
from tests.models import BY_NAME, call_case, inputs, sd15, small
from tome_core import MergeConfig, MergeRule
from tome_core.models.unet_blocks import find_blocks

SIDE = 16 * 8  # pixels of a frame


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


MLP = {"merge_attn": False, "merge_mlp": True}
MLP_ALONE = {
    "everywhere": MergeConfig(max_downsample=8, **MLP),
    "below attention": MergeConfig(rules=(MergeRule(side="kv"), MergeRule(max_downsample=8, **MLP))),
}


@pytest.mark.parametrize("rules", MLP_ALONE)
def test_rules_of_the_mlp_alone_call_an_attention_as_without_them(rules: str):
    """Neither its projections are wrapped, nor called with fewer tokens or more often."""
    model, calls = small(), []
    projections = [
        module
        for name, module in model.mid_block.named_modules()
        if ".attn1." in name and not isinstance(module, torch.nn.ModuleList)
    ]
    before = [sorted(vars(module)) for module in projections]
    for module in projections:
        module.register_forward_pre_hook(lambda module, args: calls.append((module, args[0].shape[1])))
    call_case(BY_NAME["sd15"], model)
    plain = list(calls)
    calls.clear()
    with tome_core.patch(model, MLP_ALONE[rules]) as handle:
        assert [sorted(vars(module)) for module in projections] == before
        call_case(BY_NAME["sd15"], model)
    level = handle.report().levels[1]
    assert level.mlp_tokens and not level.tokens and not level.sized_by
    assert calls == plain and len(plain) == len(projections)


class Fussy(ByProducts):
    """Refuses numbers of tokens that it did not expect, in its own way."""

    def __call__(self, attention, hidden_states, *args, **more):
        side = round(hidden_states.shape[1] ** 0.5)
        if side * side != hidden_states.shape[1]:
            raise KeyError(f"{hidden_states.shape[1]} tokens are no square")
        return super().__call__(attention, hidden_states, *args, **more)


def fussy() -> nn.Module:
    """Its processors refuse merged tokens."""
    model = sd15()
    for place in find_blocks(model):
        place.block.attn1.processor = Fussy(None)
    return model


def test_a_processor_that_refuses_merged_tokens_is_left_whole_in_tomesds_way_too():
    model = fussy()
    plain = call_case(BY_NAME["sd15"], model)
    tome_core.apply_patch(model, ratio=0.3)
    assert torch.equal(call_case(BY_NAME["sd15"], model), plain)
    assert "refuses merged tokens" in str(tome_core.report(model))


def test_a_processor_that_refuses_merged_tokens_trains_under_gradient_checkpointing():
    """The call that is run again has to ask it again, so that as many tensors are saved."""
    gradients = []
    for ratio in (0.3, 0.0):
        model = fussy().train()
        model.enable_gradient_checkpointing()
        tome_core.apply_patch(model, ratio=ratio)
        x, text = inputs(4, 2, 16, 16)
        model(x.requires_grad_(), 500, text).sample.square().sum().backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients) and gradients[0].any()
