"""The twenty faults of tomesd 0.1.3 that were found by running it: each is right here.

The numbers are tomesd's list. 01, 09, 10 and 14 (keywords, equal calls, the global generator, pickles) are laws of
every family, test_patch_contract.py; 08, masks, is test_stepping_aside.py; 11, gradients under checkpointing, is
test_gradients.py.
"""

from __future__ import annotations

import logging

import pytest
import torch
from diffusers import AuraFlowTransformer2DModel
from diffusers.models.attention import BasicTransformerBlock
from torch import nn

import tome_core
from tests.models import TEXT, call_gligen, call_unet, four_levels, gligen, inputs, merge_with_self, sd15, sdxl, seeded
from tome_core import MergeConfig, UnsupportedModelError


def run(model, height=16, width=16, batch=2, timestep=10):
    x, text = inputs(4, batch, height, width)
    with torch.no_grad():
        return call_unet(model, x, timestep, text)


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


@pytest.fixture
def each_with_itself(monkeypatch):
    """Every site at work, but each token merges with itself alone: any difference is a fault."""
    merge_with_self(monkeypatch)
    return {"merge_crossattn": True, "merge_mlp": True}


def test_02_a_block_takes_every_argument_it_took_before():
    model = one_block()
    vanilla = call_block(model)
    tome_core.apply_patch(model)
    merged = call_block(model)
    assert torch.equal(call_block(model, added_cond_kwargs={"anything": 1}), merged)
    assert not torch.equal(merged, vanilla)


def test_03_adaptive_norms_work(each_with_itself):
    model = one_block(norm_type="ada_norm_single")
    modulation = torch.linspace(-1, 1, 6 * 64).expand(2, -1)
    vanilla = call_block(model, timestep=modulation)
    tome_core.apply_patch(model, **each_with_itself)
    assert torch.equal(call_block(model, timestep=modulation), vanilla)
    assert tome_core.report(model).levels[0].calls_merged == 3


def test_04_gligen_keeps_its_fuser(monkeypatch):
    """tomesd skips it without a word."""
    model = gligen()
    fusers = [module for name, module in model.named_modules() if name.endswith(".fuser")]
    x, text = inputs(4, 2, 16, 16)
    lengths = []
    for fuser in fusers:
        fuser.register_forward_pre_hook(lambda _, args: lengths.append(args[0].shape[1]))
    with torch.no_grad():
        vanilla = call_gligen(model, x, 10, text)
        before, lengths[:] = list(lengths), []
        with monkeypatch.context() as context:
            merge_with_self(context)
            tome_core.apply_patch(model, merge_mlp=True)
            assert torch.equal(call_gligen(model, x, 10, text), vanilla) and lengths == before
        tome_core.apply_patch(model)
        lengths.clear()
        with_boxes, without = call_gligen(model, x, 10, text), call_unet(model, x, 10, text)
    assert lengths == before, "the fuser sees every token"
    assert (with_boxes - without).abs().max() > 1e-3


def test_05_positional_embeddings_are_added(each_with_itself):
    """tomesd leaves them out without a word."""
    settings = {"positional_embeddings": "sinusoidal", "num_positional_embeddings": 64}
    model = one_block(**settings)
    vanilla = call_block(model)
    tome_core.apply_patch(model, **each_with_itself)
    assert torch.equal(call_block(model), vanilla)


def test_06_double_self_attention_works(monkeypatch):
    model = one_block(double_self_attention=True)
    vanilla = call_block(model, encoder_hidden_states=None)
    config = MergeConfig(merge_crossattn=True, proportional=False)
    with monkeypatch.context() as context, tome_core.patch(model, config) as handle:
        merge_with_self(context)
        assert torch.equal(call_block(model, encoder_hidden_states=None), vanilla)
        assert handle.report().levels[0].calls_merged == 2
    tome_core.apply_patch(model, merge_crossattn=True)
    assert (call_block(model, encoder_hidden_states=None) - vanilla).abs().max() > 1e-3


@pytest.mark.parametrize("merge_mlp", [False, True])
def test_07_chunked_feed_forward_stays_chunked(merge_mlp: bool):
    """It saves memory; tomesd switches that off without a word."""
    model = one_block()
    inner = model.down_blocks[0][0].transformer_blocks[0]
    inner.set_chunk_feed_forward(16, 1)
    lengths = []
    inner.ff.register_forward_pre_hook(lambda _, args: lengths.append(args[0].shape[1]))
    tome_core.apply_patch(model, merge_mlp=merge_mlp)
    call_block(model)
    assert lengths == [16] * 4
    if merge_mlp:
        assert "mlp: the tokens are not the picture's grid" in tome_core.report(model).levels[0].reasons


@pytest.mark.slow
def test_12_and_13_compiled_models_are_patched_and_patched_ones_compiled():
    vanilla = run(sd15())
    patched = tome_core.apply_patch(sd15())
    expected = run(patched)
    for model in (
        torch.compile(patched, backend="eager", fullgraph=True),
        tome_core.apply_patch(torch.compile(sd15(), backend="eager", fullgraph=True)),
    ):
        assert torch.equal(run(model), expected)
        tome_core.remove_patch(model)
        assert torch.equal(run(model), vanilla)


@pytest.mark.parametrize("height, width", [(1, 16), (16, 1), (1, 1), (2, 2), (3, 5)])
@pytest.mark.parametrize("cell", [2, 4, 8])
def test_15_a_grid_of_one_row_or_smaller_than_a_cell_works(height: int, width: int, cell: int):
    vanilla = run(sd15(), height, width)
    model = tome_core.apply_patch(sd15(), max_downsample=8, sx=cell, sy=cell, merge_mlp=True)
    merged = run(model, height, width)
    assert merged.shape == vanilla.shape and merged.isfinite().all()
    assert torch.equal(merged, vanilla) == (height * width == 1)


@pytest.mark.parametrize("height, width", [(33, 97), (65, 63), (32, 159), (35, 33)])
def test_16_the_grid_is_exact_at_every_level_of_an_odd_latent(height: int, width: int):
    """tomesd works it out from the number of tokens, and fails at 104 of 16,384 sizes at /8."""
    model = tome_core.apply_patch(four_levels(), max_downsample=8, sx=4, sy=4)
    assert run(model, height, width, batch=1).isfinite().all()
    report = tome_core.report(model)
    assert all(level.calls_merged == level.blocks for level in report.levels)
    rows, columns, tokens = height, width, []
    for _ in report.levels:
        tokens.append(rows * columns)
        rows, columns = -(-rows // 2), -(-columns // 2)
    assert [level.tokens[0][0] for level in report.levels] == tokens


@pytest.mark.parametrize("ratio", [0.75, 0.9, 1.0])
def test_17_a_ratio_over_the_cap_is_clamped_and_said(ratio: float, caplog):
    model = tome_core.apply_patch(sd15(), ratio=ratio)
    expected = run(tome_core.apply_patch(sd15(), ratio=0.75))
    assert torch.equal(run(model), expected)
    assert ("over the cap 0.75" in str(tome_core.report(model))) == (ratio > 0.75)
    assert ("over the cap 0.75" in caplog.text) == (ratio > 0.75)


@pytest.mark.parametrize("batch", [1, 3])
def test_18_destinations_are_random_at_every_batch(batch: int):
    pictures = [run(tome_core.apply_patch(sd15(), use_rand=rand, seed=5), batch=batch) for rand in (True, False)]
    assert not torch.equal(*pictures)


def test_19_a_model_without_such_blocks_is_refused_with_what_was_found():
    settings = {"num_mmdit_layers": 2, "num_single_dit_layers": 1, "num_attention_heads": 2, "attention_head_dim": 8}
    sizes = {"sample_size": 8, "joint_attention_dim": 16, "caption_projection_dim": 16, "pos_embed_max_size": 64}
    with torch.random.fork_rng(devices=[]):
        model = AuraFlowTransformer2DModel(**settings, **sizes)
    with pytest.raises(UnsupportedModelError, match=r"BasicTransformerBlock.*found .*2 AuraFlowJointTransformerBlock"):
        tome_core.apply_patch(model)
    assert issubclass(UnsupportedModelError, ValueError)
    assert tome_core.remove_patch(model) is model and not tome_core.report(model).patched


def test_19_a_setting_that_reaches_nothing_is_said_once(caplog):
    """SDXL has no attention at the latent's own size, where tomesd looks for it by default."""
    with caplog.at_level(logging.WARNING):
        model = tome_core.apply_patch(sdxl(), max_downsample=1)
    assert len(caplog.records) == 1 and "/2, /4" in caplog.text
    report = tome_core.report(model)
    assert not any(level.covered for level in report.levels) and "nothing will merge" in str(report)


def test_20_nothing_is_said_about_unexpected_arguments(caplog, recwarn):
    x, text = inputs(4, 2, 16, 16)
    model = tome_core.apply_patch(gligen())
    with caplog.at_level(logging.INFO), torch.no_grad():
        call_gligen(model, x, 10, text)
    assert "not expected" not in caplog.text
    assert not [one for one in recwarn if "not expected" in str(one.message)]
