"""tomesd's way, in which parts of a block are called with fewer tokens: what does not fit is left alone and named."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import tome_core
from benchmarks.sd_block import BasicTransformerBlock, SpatialTransformer, UNet, make_block, make_inputs
from tome_core import MergeConfig

TOMESDS, OURS = MergeConfig(proportional=False), MergeConfig()
both_ways = pytest.mark.parametrize("config", [TOMESDS, OURS], ids=["tomesd's way", "ours"])


@pytest.fixture(scope="module")
def block():
    return make_block()


@pytest.fixture(scope="module")
def inputs():
    return make_inputs(8, 2, "cpu", torch.float32)


def block_of(unet: UNet) -> BasicTransformerBlock:
    return unet.input_blocks[0][0].transformer_blocks[0]


def reasons(handle) -> dict[str, int]:
    return handle.report().levels[0].reasons


class _Foreign(nn.Module):
    """Somebody's replacement of the attention; `change` is done to what it returns."""

    def __init__(self, attention: nn.Module, change) -> None:
        super().__init__()
        self.attention, self.change = attention, change

    def forward(self, x, context=None, mask=None, value=None, keys=None):
        self.keys = keys  # a word of somebody's own
        return self.change(self.attention(x, context, mask), x)


@pytest.mark.parametrize(
    "change",
    [
        lambda out, x: out if x.shape[1] == 64 else out[:, :5],  # windows of its own, tokens dropped
        lambda out, x: out if x.shape[1] == 64 else out.transpose(1, 2),
        lambda out, x: out if x.shape[1] == 64 else (out, None),
    ],
    ids=["fewer tokens", "transposed", "tuple"],
)
def test_an_output_that_cannot_be_unmerged_leaves_the_call_unmerged(block, inputs, change):
    foreign = copy.deepcopy(block)
    block_of(foreign).attn1 = _Foreign(block_of(foreign).attn1, change)
    expected = foreign(*inputs)
    with tome_core.patch(foreign, TOMESDS) as handle:
        assert torch.equal(foreign(*inputs), expected)
        assert reasons(handle) == {"attn: what it returned cannot be unmerged": 1}
    with tome_core.patch(foreign, OURS) as handle:  # which gives the module all of its tokens
        assert not torch.equal(foreign(*inputs), expected)
        assert reasons(handle) == {} and handle.report().merged_anything


def test_a_part_that_refuses_fewer_tokens_leaves_the_call_unmerged(block, inputs):
    def picky(out, x):
        if x.shape[1] != 64:
            raise ValueError("all of them, please")
        return out

    foreign = copy.deepcopy(block)
    block_of(foreign).attn1 = _Foreign(block_of(foreign).attn1, picky)
    expected = foreign(*inputs)
    with tome_core.patch(foreign, TOMESDS) as handle:
        assert torch.equal(foreign(*inputs), expected)
        assert reasons(handle) == {"attn: refuses merged tokens": 1}


def _calling(**arguments) -> UNet:
    """A UNet whose block calls its attention in ways that hosts do."""
    transformer = SpatialTransformer()
    transformer.transformer_blocks = nn.ModuleList([_CallingBlock(arguments)])
    return UNet([[transformer]]).eval()


class _CallingBlock(BasicTransformerBlock):
    def __init__(self, arguments) -> None:
        super().__init__()
        self.arguments = arguments
        self.attn1 = _Foreign(self.attn1, lambda out, x: out)

    def _forward(self, x, context=None):
        normed = self.norm1(x)
        return self.attn1(normed, **{name: make(normed) for name, make in self.arguments.items()}) + x


@both_ways
@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"mask": lambda x: torch.ones(2, 1, 64)}, "an attention mask came along"),
        ({"context": lambda x: torch.cat([x, x], 1)}, "keys and values are not the picture's tokens"),
    ],
    ids=["mask", "bank of keys"],
)
def test_a_call_that_does_not_fit_is_left_alone_and_named(inputs, arguments, reason, config):
    model = _calling(**arguments)
    expected = model(*inputs)
    with tome_core.patch(model, config) as handle:
        assert torch.equal(model(*inputs), expected)
        assert reasons(handle) == {f"attn: {reason}": 1}
        assert f"nothing merged: {reason}" in str(handle.report())


@both_ways
def test_a_word_of_somebodys_own_is_passed_on(inputs, config):
    model = _calling(keys=lambda x: "theirs")
    plain = model(*inputs)
    with tome_core.patch(model, config) as handle:
        assert not torch.equal(model(*inputs), plain) and reasons(handle) == {}
    assert block_of(model).attn1.keys == "theirs"


@both_ways
def test_a_block_called_by_itself_is_left_alone_without_a_word(block, inputs, config):
    """It is no call of the UNet, and whose it is nobody knows."""
    tokens = inputs[0].flatten(2).transpose(1, 2)
    expected = block_of(block)(tokens, inputs[2])
    with tome_core.patch(block, config) as handle:
        assert torch.equal(block_of(block)(tokens, inputs[2]), expected)
        assert reasons(handle) == {} and handle.report().calls == 0


@both_ways
def test_maps_are_kept_only_where_asked_for(block, inputs, config):
    with tome_core.patch(block, config) as handle:
        block(*inputs)
        assert handle.maps() == {}
        handle.keep_maps()
        block(*inputs)
        kept = handle.maps()[0]
        assert kept.grid[:2] == (8, 8) and kept.group.shape == (2, 64) and kept.group.device.type == "cpu"
        assert int(kept.group.max()) + 1 == kept.num_groups == 32
