"""A merged feed-forward layer: what it gives, in which levels and steps, and how it is counted."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tome_core
from tests.families import MODELS
from tests.models import sdxl, seeded
from tome_core import MergeConfig, MergePlan, MergeRule
from tome_core.engine.merged_mlp import merge_input, pick_samples, unmerge_output
from tome_core.merging.grid import Grid
from tome_core.models.unet_blocks import find_blocks

GRID, SAMPLES = Grid(8, 8), pick_samples(Grid(16, 16), torch.device("cpu"))[0]
MLPS = MergeRule(merge_attn=False, merge_mlp=True, ratio=0.75, use_rand=False, side="kv", min_downsample=4)


@seeded
def layer() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 24), nn.GELU(), nn.Linear(24, 6))


def merged(function, x, plan, samples):
    """The output of a layer on merged tokens."""
    tokens = merge_input(x, plan, samples)
    return unmerge_output(function(tokens), tokens, x, plan, samples)


def tokens_in_groups(spread: float) -> tuple[torch.Tensor, MergePlan]:
    """256 tokens around 64 means, four at each, and their plan."""
    dice = torch.Generator().manual_seed(1)
    means = torch.randn(2, 64, 6, generator=dice).repeat_interleave(4, 1)
    return means + spread * torch.randn(2, 256, 6, generator=dice), MergePlan(torch.arange(256)[None] // 4, 64)


@torch.no_grad()
def test_equal_tokens_lose_nothing_and_samples_are_exact():
    function = layer()
    x, plan = tokens_in_groups(0.0)
    for samples in (None, SAMPLES):
        torch.testing.assert_close(merged(function, x, plan, samples), function(x), rtol=1e-4, atol=1e-5)
    x, plan = tokens_in_groups(0.3)
    out = merged(function, x, plan, SAMPLES)
    torch.testing.assert_close(out[:, SAMPLES], function(x)[:, SAMPLES])


@torch.no_grad()
@pytest.mark.parametrize("dtype, most", [(torch.float32, 0.5), (torch.bfloat16, 0.6)])
def test_the_correction_takes_away_half_of_the_error_and_more(dtype, most):
    function, (x, plan) = layer().to(dtype), tokens_in_groups(0.3)
    x = x.to(dtype)
    errors = [(merged(function, x, plan, samples) - function(x)).float().norm() for samples in (None, SAMPLES)]
    assert 0 < errors[1] < most * errors[0]


def call(model, timestep: float, size: int = 16):
    return MODELS["sdxl"].call(model, 2, size, size, timestep=timestep)


def test_only_the_coarsest_level_merges_below_its_timestep_and_nothing_stays():
    model = sdxl()
    config = MergeConfig(rules=(MergeRule(ratio=0.5), MergeRule(**{**vars(MLPS), "max_timestep": 800.0})))
    layers = [place.block.ff for place in find_blocks(model) if place.halvings == 2]
    plain = [call(model, timestep) for timestep in (900, 700)]
    with tome_core.patch(model, config) as handle:
        call(model, 900)
        fine, coarse = handle.report().levels
        assert fine.calls_merged and not coarse.calls_merged and not coarse.mlp_tokens
        call(model, 700)
        fine, coarse = handle.report().levels
    assert not fine.mlp_tokens and coarse.mlp_tokens == ((16, 5),) and coarse.calls_merged == len(layers)
    assert "MLP 16 tokens -> 5" in str(handle.report())
    with tome_core.patch(model, MergeConfig(rules=(MLPS,), max_timestep=800.0)) as handle:
        assert torch.equal(call(model, 900), plain[0]) and not torch.equal(call(model, 700), plain[1])
    assert all("forward" not in vars(layer) for layer in layers)
    assert torch.equal(call(model, 700), plain[1])


def test_the_halves_of_guidance_share_a_match_and_later_steps_keep_it():
    model = sdxl()
    config, seen = MergeConfig(rules=(MLPS,), keep=100.0), []
    with tome_core.patch(model, config) as handle:
        handle.keep_maps()
        x = torch.randn(1, 4, 16, 16, generator=torch.Generator().manual_seed(0)).repeat(2, 1, 1, 1)
        for timestep, pictures in ((500, 1), (450, 1), (300, 1), (300, None)):
            handle.set_time(timestep=timestep, sampling="a" if pictures else "b", pictures=pictures)
            text = torch.randn(2, 7, 16, generator=torch.Generator().manual_seed(timestep))
            MODELS["sdxl"].call(model, 2, 16, 16, latent=x, text=text, timestep=timestep)
            seen.append(handle.maps()[1].group)
    assert torch.equal(seen[0][0], seen[0][1]) and not torch.equal(seen[3][0], seen[3][1])
    assert torch.equal(seen[0], seen[1]) and not torch.equal(seen[0], seen[2])


def test_a_layer_that_refuses_fewer_tokens_is_left_alone_and_named():
    model = sdxl()
    plain = call(model, 500)
    with tome_core.patch(model, MergeConfig(rules=(MLPS,))) as handle:
        for place in find_blocks(model):
            place.block.ff.register_forward_pre_hook(lambda _, args: args if args[0].shape[1] in (64, 16) else 1 / 0)
        assert torch.equal(call(model, 500), plain)
    assert handle.report().levels[1].reasons == {"mlp: refuses merged tokens": len(
        [place for place in find_blocks(model) if place.halvings == 2])}
