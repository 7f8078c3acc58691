"""Blocks of a UNet keep all that they are and take: faults of tomesd 0.1.3 that were found by running it.

Others are laws of every family (`test_patch_contract.py`), of odd sizes (`models/test_unet.py`), of checkpoints
(`models/test_gradients.py`) and of compilers (`models/test_compiled.py`).
"""

from __future__ import annotations

import logging
from functools import partial

import torch
from diffusers.models.attention import BasicTransformerBlock
from torch import nn

import tome_core
from tests.models import BY_NAME, TEXT, call_case, call_gligen, call_unet, gligen, inputs, merge_with_self, sd15, seeded
from tome_core import MergeConfig

EVERYTHING = MergeConfig(merge_crossattn=True, merge_mlp=True, proportional=False)


class OneBlock(nn.Module):
    """A block alone in what the patch takes for a transformer; calls go straight to the block."""

    def __init__(self, **block):
        super().__init__()
        self.transformer_blocks = nn.ModuleList([BasicTransformerBlock(64, 4, 16, cross_attention_dim=TEXT, **block)])

    def forward(self, x, **kwargs):
        tokens = x.flatten(2).transpose(1, 2)
        return self.transformer_blocks[0](tokens, **kwargs)


OneBlock.__name__ = "Transformer2DModel"


class OneBlockUNet(nn.Module):
    """A UNet of diffusers' names, of one stage, with nothing else in it. of_block: what the block is called with."""

    def __init__(self, **block):
        super().__init__()
        self.down_blocks = nn.ModuleList([nn.ModuleList([OneBlock(**block)])])
        self.mid_block, self.up_blocks = None, nn.ModuleList()

    def forward(self, x, timestep, of_block):
        return self.down_blocks[0][0](x, **of_block)


def one_block(**settings):
    return seeded(lambda: OneBlockUNet(**settings))()


def call_block(model, **kwargs):
    x = torch.randn(2, 64, 8, 8, generator=torch.Generator().manual_seed(0))
    text = torch.randn(2, 7, TEXT, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model(x, 10, {"encoder_hidden_states": text, **kwargs})


def test_every_part_of_a_block_runs_with_every_argument_that_it_took_before(monkeypatch):
    """Each token merges with itself alone, so any difference is a fault. tomesd leaves embeddings out."""
    embedded = {"positional_embeddings": "sinusoidal", "num_positional_embeddings": 64}
    for settings, call, merged in (
        ({}, {"added_cond_kwargs": {"anything": 1}}, 3), (embedded, {}, 3),
        ({"double_self_attention": True}, {"encoder_hidden_states": None}, 3),
    ):  # fmt: skip
        model = one_block(**settings)
        vanilla = call_block(model, **call)
        with monkeypatch.context() as context, tome_core.patch(model, EVERYTHING) as handle:
            merge_with_self(context)
            assert torch.equal(call_block(model, **call), vanilla)
            assert handle.report().levels[0].calls_merged == merged
        with tome_core.patch(model, EVERYTHING):
            assert (call_block(model, **call) - vanilla).abs().max() > 1e-3


def test_gligen_keeps_its_fuser_and_nothing_is_said_about_unexpected_arguments(caplog, recwarn):
    """tomesd skips it without a word."""
    model = gligen()
    fusers = [module for name, module in model.named_modules() if name.endswith(".fuser")]
    x, text = inputs(4, 2, 16, 16)
    lengths = []
    for fuser in fusers:
        fuser.register_forward_pre_hook(lambda _, args: lengths.append(args[0].shape[1]))
    with caplog.at_level(logging.INFO), torch.no_grad():
        call_gligen(model, x, 10, text)
        before, lengths[:] = list(lengths), []
        tome_core.apply_patch(model, merge_mlp=True)
        with_boxes, without = call_gligen(model, x, 10, text), call_unet(model, x, 10, text)
    assert lengths == before, "the fuser sees every token"
    assert (with_boxes - without).abs().max() > 1e-3
    assert "not expected" not in caplog.text
    assert not [warning for warning in recwarn if "not expected" in str(warning.message)]


def test_chunked_feed_forward_stays_chunked():
    """It saves memory; tomesd switches that off without a word."""
    for merge_mlp in (False, True):
        model, lengths = one_block(), []
        inner = model.down_blocks[0][0].transformer_blocks[0]
        inner.set_chunk_feed_forward(16, 1)
        inner.ff.register_forward_pre_hook(lambda _, args, lengths=lengths: lengths.append(args[0].shape[1]))
        tome_core.apply_patch(model, merge_mlp=merge_mlp)
        call_block(model)
        assert lengths == [16] * 4
        reasons = tome_core.report(model).levels[0].reasons
        assert ("mlp: the tokens are not the picture's grid" in reasons) == merge_mlp


def test_a_ratio_over_the_cap_is_clamped_and_said(caplog):
    run = partial(call_case, BY_NAME["sd15"], timestep=10)
    expected = run(tome_core.apply_patch(sd15(), ratio=0.75))
    assert "over the cap" not in caplog.text
    model = tome_core.apply_patch(sd15(), ratio=1.0)
    assert torch.equal(run(model), expected)
    assert "over the cap 0.75" in str(tome_core.report(model)) and "over the cap 0.75" in caplog.text
