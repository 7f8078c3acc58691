"""A merged feed-forward layer: what it gives, in which levels and steps, and how it is counted."""

import pytest
import torch
from torch import nn

import tome_core
from tests.families import MODELS
from tests.models import inputs, sdxl, seeded
from tome_core import MergeConfig, MergePlan, MergeRule
from tome_core.engine.merged_mlp import merge_input, pick_samples, unmerge_output
from tome_core.merging.grid import Grid
from tome_core.models.unet_blocks import find_blocks

SAMPLES = pick_samples(Grid(32, 32), torch.device("cpu"))[0]
MLPS = MergeRule(merge_attn=False, merge_mlp=True, ratio=0.75, use_rand=False, side="kv", min_downsample=4)


@seeded
def layer() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 24), nn.GELU(), nn.Linear(24, 6))


def merged(function, x, plan, samples):
    """The output of a layer on merged tokens."""
    tokens = merge_input(x, plan, samples)
    return unmerge_output(function(tokens), tokens, x, plan, samples)


def tokens_in_groups(spread: float) -> tuple[torch.Tensor, MergePlan]:
    """1,024 tokens around 256 means, four at each, and their plan."""
    dice = torch.Generator().manual_seed(1)
    means = torch.randn(2, 256, 6, generator=dice).repeat_interleave(4, 1)
    return means + spread * torch.randn(2, 1024, 6, generator=dice), MergePlan(torch.arange(1024)[None] // 4, 256)


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
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_correction_finds_a_linear_map_and_lessens_the_error_of_others(dtype):
    x, plan = tokens_in_groups(0.3)
    x = x.to(dtype)
    for function, most in ((layer()[0], 0.15), (layer(), 0.9)):
        function = function.to(dtype)
        errors = [(merged(function, x, plan, samples) - function(x)).float().norm() for samples in (None, SAMPLES)]
        assert 0 < errors[1] < most * errors[0]


@torch.no_grad()
def test_half_precision_and_autocast_give_what_single_precision_gives():
    x, plan = tokens_in_groups(0.3)
    x = torch.cat([x, torch.zeros(2, 1024, 400)], 2) * 60  # products of 60**2 * 6 channels are near float16's limit
    function = seeded(lambda: nn.Linear(406, 16))()
    expected = merged(function, x, plan, SAMPLES)
    half = merged(lambda y: function(y.float()).half(), x.half(), plan, SAMPLES)
    assert half.dtype == torch.float16 and (half - expected).norm() < 0.01 * expected.norm()
    with torch.autocast("cpu", torch.bfloat16):
        mixed = merged(function, x, plan, SAMPLES)
    assert mixed.dtype == torch.bfloat16 and (mixed - expected).norm() < 0.02 * expected.norm()


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


def test_the_halves_of_guidance_share_a_match_and_later_steps_keep_it(monkeypatch):
    model, groups = sdxl(), []

    def note(x, plan, samples):
        groups.append(plan.group)
        return merge_input(x, plan, samples)

    monkeypatch.setattr("tome_core.engine.state.merge_input", note)
    x, (_, text) = inputs(4, 1, 16, 16)[0].repeat(2, 1, 1, 1), inputs(4, 2, 16, 16)
    with tome_core.patch(model, MergeConfig(rules=(MLPS,), keep=100.0)) as handle, torch.no_grad():
        for timestep, pictures in ((500, 1), (450, 1), (300, 1), (300, None)):
            handle.set_time(timestep=timestep, sampling=str(pictures), pictures=pictures)
            MODELS["sdxl"].forward(model, x, timestep, text)
    steps = [groups[number : number + len(groups) // 4] for number in range(0, len(groups), len(groups) // 4)]
    assert all(torch.equal(group[0], group[-1]) for step in steps[:3] for group in step)
    assert not all(torch.equal(group[0], group[-1]) for group in steps[3])
    assert all(map(torch.equal, *steps[:2])) and not all(map(torch.equal, *steps[1:3]))


def test_a_layer_that_refuses_fewer_tokens_is_left_alone_and_named():
    model = sdxl()
    plain, layers = call(model, 500), [place.block.ff for place in find_blocks(model) if place.halvings == 2]
    for layer in layers:
        layer.net[0].register_forward_pre_hook(lambda _, args: args if args[0].shape[1] == 16 else 1 / 0)
    with tome_core.patch(model, MergeConfig(rules=(MLPS,))) as handle:
        assert torch.equal(call(model, 500), plain)
    assert handle.report().levels[1].reasons["mlp: refuses merged tokens"] == len(layers)
