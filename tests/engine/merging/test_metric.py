"""What a match compares: keys, or keys and values, by cosine or by distance."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch

import tome_core
from benchmarks.sd_block import make_block, make_inputs
from tests.families import every_family_in_time, largest_difference
from tests.models import call_case, call_unet, fixed, unet
from tome_core import PRESETS, MergeConfig, MergeRule
from tome_core.engine.match import match
from tome_core.merging.grid import Grid, Layout
from tome_core.merging.methods import METHODS, MatchOptions
from tome_core.merging.methods.bipartite import best_destination, refine_plan
from tome_core.merging.metric import METRICS, of_unit_spread

MATCH = METHODS["bipartite"].match


def tokens(batch: int = 2, count: int = 64, channels: int = 6, seed: int = 0) -> torch.Tensor:
    return torch.randn(batch, count, channels, generator=torch.Generator().manual_seed(seed))


def test_the_nearest_destination_is_the_one_of_least_distance():
    x = tokens() + 3  # an offset, which a dot product alone would follow
    destinations, sources = torch.arange(0, 64, 4)[None], torch.arange(1, 64, 4)[None]
    found = best_destination(x, sources, destinations, by_distance=True)
    apart = torch.cdist(x[:, sources[0]].double(), x[:, destinations[0]].double())
    assert torch.equal(found[1], apart.argmin(-1))
    assert largest_difference(found[0], (-apart.amin(-1) ** 2 / 2).float()) < 1e-4


def test_those_merge_whose_partner_is_nearest():
    x = tokens() * torch.linspace(0.1, 3, 64)[:, None]
    plan = MATCH(x, Grid(8, 8), MatchOptions(0.25, 2, 2, by_distance=True))
    merged, apart = plan.merge(x), []
    for sample in range(2):
        group, size = plan.group[sample].tolist(), plan.sizes[sample].tolist()
        own = {group[t]: t for t in range(64) if size[group[t]] == 1 or not ((t // 8) % 2 or t % 2)}
        centre = torch.tensor([own[number] for number in group])
        apart.append((x[sample] - x[sample][centre]).norm(dim=-1))
        alone = [t for t in range(64) if centre[t] == t and plan.sizes[sample][plan.group[sample][t]] == 1]
        cells = [t for t in alone if (t // 8) % 2 or t % 2]  # sources that stayed by themselves
        kept_away = torch.cdist(x[sample][cells], x[sample][[own[number] for number in range(16)]]).amin(-1)
        assert kept_away.min() >= apart[-1].max() - 1e-5
    assert merged.shape[1] == 48


def test_refining_by_distance_brings_every_token_to_its_nearest_mean():
    x = tokens(1) + 2
    plan = MATCH(x, Grid(8, 8), MatchOptions(0.75, 2, 2, by_distance=True))
    better = refine_plan(plan, x, 20, by_distance=True)
    centres = better.merge(x)[0][better.sizes[0] > 0]
    nearest = torch.cdist(x[0], centres).amin(-1)
    own = (x - better.unmerge(better.merge(x))).norm(dim=-1)[0]
    assert largest_difference(own, nearest) < 1e-4
    before = (x - plan.unmerge(plan.merge(x))).pow(2).sum()
    assert (x - better.unmerge(better.merge(x))).pow(2).sum() < before


def test_keys_and_values_count_alike_whatever_their_scale():
    keys, values = tokens(1, 64, 32), tokens(1, 64, 32, seed=1) * 7 - 3
    both = of_unit_spread(keys, values)
    assert both.shape == (1, 64, 64)
    for half in both.split(32, -1):
        assert abs(half.pow(2).mean().item() - 1) < 1e-4 and half.mean(1).abs().max() < 1e-5


def test_distances_are_what_they_were_but_for_one_factor():
    x = tokens(2, 16, 32) * 5 + 2
    ratio = torch.cdist(of_unit_spread(x, x), of_unit_spread(x, x)) / torch.cdist(x, x)
    off = ~torch.eye(16, dtype=torch.bool)
    for sample in ratio:
        assert sample[off].max() / sample[off].min() - 1 < 1e-3


def test_a_sample_is_compared_as_it_would_be_alone():
    x, y = tokens(3, 16, 32), tokens(3, 16, 32, seed=1)
    assert largest_difference(of_unit_spread(x, y)[1:2], of_unit_spread(x[1:2], y[1:2])) < 1e-5


@every_family_in_time
@pytest.mark.parametrize("metric", METRICS)
def test_every_family_merges_by_every_metric(case, metric):
    model = case.build()
    vanilla = call_case(case, model)
    with tome_core.patch(model, MergeConfig(side="kv", ratio=0.75, metric=metric, refine=1)) as handle:
        merged = call_case(case, model)
        assert torch.equal(merged, call_case(case, model))
    assert merged.isfinite().all() and largest_difference(merged, vanilla) > 1e-3
    assert handle.report().levels[0].tokens
    assert torch.equal(call_case(case, model), vanilla)


@pytest.mark.parametrize("name", PRESETS)
def test_blocks_without_self_attention_are_left_alone_and_named(name):
    """Their first attention looks at the prompt too, as in the four times upscaler: its keys are no metric."""
    model = fixed(unet(only_cross_attention=True, cross_attention_dim=48))
    x, text = torch.randn(1, 4, 32, 32), torch.randn(1, 7, 48)
    plain = call_unet(model, x, 5, text)
    with tome_core.patch(model, name) as handle:
        assert torch.equal(call_unet(model, x, 5, text), plain)
    assert list(handle.report().levels[0].reasons) == ["attn: keys and values are not the picture's tokens"]


def test_the_metric_decides_what_merges():
    block, inputs = make_block(), make_inputs(16, 1, "cpu", torch.float32)
    maps = {}
    for metric in METRICS:
        with tome_core.patch(block, MergeConfig(side="kv", ratio=0.75, use_rand=False, metric=metric)) as handle:
            handle.keep_maps()
            with torch.no_grad():
                block(*inputs)
            maps[metric] = handle.maps()[0].group
    assert not any(torch.equal(maps[one], maps[other]) for one, other in combinations(METRICS, 2))


def test_each_metric_compares_what_it_is_called():
    """Of keys and values; no attention sees the block's input, whose part keys play by cosine."""
    grid, options = Grid(8, 8), {"ratio": 0.75, "side": "kv", "use_rand": False}
    k, v = (tokens(2, 64, 12, seed) + 1 for seed in range(2))
    compared = {"input": (k, False), "keys+values": (of_unit_spread(k, v), True)}
    for metric in METRICS:
        x, by_distance = compared[metric]
        expected = MATCH(x, grid, MatchOptions(0.75, 2, 2, by_distance=by_distance))
        found = match(*(one.unflatten(2, (3, 4)) for one in (k, v)), Layout(grid), MergeRule(**options, metric=metric))
        assert torch.equal(found.group, expected.group)
