"""Calls of UNets, and tomesd's way, in which parts of a block are called with fewer tokens: what does not fit is left
alone and named.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from diffusers.models.attention_processor import AttnProcessor, AttnProcessor2_0
from torch import nn

import tome_core
from benchmarks.sd_block import BasicTransformerBlock, SpatialTransformer, UNet, make_block, make_inputs
from tests.beside.ways import ByProducts
from tests.models import BY_NAME, call_case, inputs, sd15, small
from tome_core import MergeConfig, MergeRule
from tome_core.models.unet_blocks import find_blocks

TOMESDS, OURS = MergeConfig(proportional=False), MergeConfig()
both_ways = pytest.mark.parametrize("config", [TOMESDS, OURS], ids=["tomesd's way", "ours"])
INPUTS = make_inputs(8, 2, "cpu", torch.float32)


def reasons(handle: Any) -> dict[str, int]:
    return handle.report().levels[0].reasons


def block_of(unet: UNet) -> BasicTransformerBlock:
    return unet.input_blocks[0][0].transformer_blocks[0]


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


MLP = {"max_downsample": 8, "merge_attn": False, "merge_mlp": True}


@pytest.mark.parametrize("rules", [(MergeRule(**MLP),), (MergeRule(side="kv"), MergeRule(**MLP))],
                         ids=["everywhere", "below attention"])  # fmt: skip
def test_rules_of_the_mlp_alone_call_an_attention_as_without_them(rules: tuple[MergeRule, ...]):
    """Neither its projections are wrapped, nor called with fewer tokens or more often."""
    model, calls = small(), []
    layers = [one for name, one in model.mid_block.named_modules() if ".attn1." in name and not list(one.children())]
    before = [sorted(vars(layer)) for layer in layers]
    for layer in layers:
        layer.register_forward_pre_hook(lambda layer, args: calls.append((layer, args[0].shape[1])))
    call_case(BY_NAME["sd15"], model)
    plain = list(calls)
    calls.clear()
    with tome_core.patch(model, MergeConfig(rules=rules)) as handle:
        assert [sorted(vars(layer)) for layer in layers] == before
        call_case(BY_NAME["sd15"], model)
    level = handle.report().levels[1]
    assert level.mlp_tokens and not level.tokens and not level.sized_by
    assert calls == plain and len(plain) == len(layers)


# --- an attention that does not take fewer tokens ---------------------------------------------------------------------


class Changed(nn.Module):
    """Another program's replacement of the attention; `change` is done to what it returns for fewer tokens."""

    def __init__(self, attention: nn.Module, change: Callable[[torch.Tensor], Any] = lambda out: out) -> None:
        super().__init__()
        self.attention, self.change = attention, change

    def forward(self, x, context=None, mask=None, value=None, keys=None):
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
def test_what_cannot_be_called_with_fewer_tokens_is_left_whole_in_tomesds_way(change, why):
    model = make_block()
    block_of(model).attn1 = Changed(block_of(model).attn1, change)
    expected = model(*INPUTS)
    with tome_core.patch(model, TOMESDS) as handle:
        assert torch.equal(model(*INPUTS), expected) and reasons(handle) == {f"attn: {why}": 1}
    with tome_core.patch(model, OURS) as handle:  # which gives the module all of its tokens
        assert not torch.equal(model(*INPUTS), expected)
        assert reasons(handle) == {} and handle.report().merged_anything


class Fussy(ByProducts):
    """Refuses numbers of tokens that it did not expect, in its own way."""

    def __call__(self, attention, hidden_states, *args, **more):
        if round(hidden_states.shape[1] ** 0.5) ** 2 != hidden_states.shape[1]:
            raise KeyError(f"{hidden_states.shape[1]} tokens are no square")
        return super().__call__(attention, hidden_states, *args, **more)


def test_a_processor_that_refuses_merged_tokens_trains_under_gradient_checkpointing():
    """The call that is run again has to ask it again, so that as many tensors are saved."""
    gradients = []
    for ratio in (0.3, 0.0):
        model = sd15().train()
        for place in find_blocks(model):
            place.block.attn1.processor = Fussy(None)
        model.enable_gradient_checkpointing()
        tome_core.apply_patch(model, ratio=ratio)
        x, text = inputs(4, 2, 16, 16)
        model(x.requires_grad_(), 500, text).sample.square().sum().backward()
        assert ("refuses merged tokens" in str(tome_core.report(model))) == (ratio > 0)
        gradients.append(x.grad)
    assert torch.equal(*gradients) and gradients[0].any()


# --- calls of a block, and of its attention ---------------------------------------------------------------------------


def _calling(**arguments: Callable[[torch.Tensor], Any]) -> UNet:
    """A UNet whose block calls its attention with more arguments."""

    class Block(BasicTransformerBlock):
        def _forward(self, x, context=None):
            normed = self.norm1(x)
            return self.attn1(normed, **{name: make(normed) for name, make in arguments.items()}) + x

    transformer = SpatialTransformer()
    transformer.transformer_blocks = nn.ModuleList([block := Block()])
    block.attn1 = Changed(block.attn1)
    return UNet([[transformer]]).eval()


@both_ways
@pytest.mark.parametrize("arguments, why", [
    ({"mask": lambda x: torch.ones(2, 1, 64)}, "an attention mask came along"),
    ({"context": lambda x: torch.cat([x, x], 1)}, "keys and values are not the picture's tokens"),
    ({"keys": lambda x: "theirs"}, ""),  # it is passed on
], ids=["mask", "bank of keys", "a word of its own"])  # fmt: skip
def test_a_call_that_does_not_fit_is_left_alone_and_named(arguments, why, config):
    model = _calling(**arguments)
    expected = model(*INPUTS)
    with tome_core.patch(model, config) as handle:
        assert torch.equal(model(*INPUTS), expected) == bool(why)
        assert reasons(handle) == ({f"attn: {why}": 1} if why else {})
        assert not why or f"nothing merged: {why}" in str(handle.report())
    assert block_of(model).attn1.keys == ("theirs" if "keys" in arguments else None)


@both_ways
def test_a_block_called_by_itself_is_left_alone_without_a_word(config):
    """It is no call of the UNet, and nobody knows whose it is."""
    model, tokens = make_block(), INPUTS[0].flatten(2).transpose(1, 2)
    expected = block_of(model)(tokens, INPUTS[2])
    with tome_core.patch(model, config) as handle:
        assert torch.equal(block_of(model)(tokens, INPUTS[2]), expected)
        assert reasons(handle) == {} and handle.report().calls == 0


@both_ways
def test_maps_are_kept_only_if_they_are_asked_for(config):
    with tome_core.patch(model := make_block(), config) as handle:
        model(*INPUTS)
        assert handle.maps() == {}
        handle.keep_maps()
        model(*INPUTS)
        kept = handle.maps()[0]
        assert kept.grid[:2] == (8, 8) and kept.group.shape == (2, 64) and kept.group.device.type == "cpu"
        assert int(kept.group.max()) + 1 == kept.num_groups == 32
