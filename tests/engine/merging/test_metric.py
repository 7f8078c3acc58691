"""What a match compares: keys, or keys and values, by cosine or by distance."""

from __future__ import annotations

import pytest
import torch

import tome_core
from tests.families import largest_difference
from tests.models import call_unet, fixed, unet
from tome_core import MergeRule
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
    assert largest_difference(found[0], (-(apart.amin(-1) ** 2) / 2).float()) < 1e-4


def test_refining_by_distance_brings_every_token_to_its_nearest_mean():
    x = tokens(1) + 2
    plan = MATCH(x, Grid(8, 8), MatchOptions(0.75, 2, 2, by_distance=True))
    better = refine_plan(plan, x, 20, by_distance=True)
    centres = better.merge(x)[0][better.sizes[0] > 0]
    nearest = torch.cdist(x[0], centres).amin(-1)
    own = (x - better.unmerge(better.merge(x))).norm(dim=-1)[0]
    assert largest_difference(own, nearest) < 1e-4


def test_keys_and_values_count_alike_whatever_their_scale_and_every_sample_as_if_alone():
    keys, values = tokens(3, 64, 32), tokens(3, 64, 32, seed=1) * 7 - 3
    both = of_unit_spread(keys, values)
    assert both.shape == (3, 64, 64)
    for half in both.split(32, -1):
        assert (half.pow(2).mean((1, 2)) - 1).abs().max() < 1e-4 and half.mean(1).abs().max() < 1e-5
    assert largest_difference(both[1:2], of_unit_spread(keys[1:2], values[1:2])) < 1e-5
    twice = of_unit_spread(values, values)
    ratio = torch.cdist(twice, twice) / torch.cdist(values, values)
    off_diagonal = ratio[:, ~torch.eye(64, dtype=torch.bool)]
    assert (off_diagonal.amax(1) / off_diagonal.amin(1) - 1).max() < 1e-3, "distances are scaled by one factor"


def test_each_metric_compares_what_it_is_called():
    """Of keys and values; no attention sees the block's input, in whose place keys are compared by cosine."""
    grid, options = Grid(8, 8), {"ratio": 0.75, "side": "kv", "use_rand": False}
    k, v = (tokens(2, 64, 12, seed) + 1 for seed in range(2))
    compared = {"input": (k, False), "keys+values": (of_unit_spread(k, v), True)}
    for metric in METRICS:
        x, by_distance = compared[metric]
        expected = MATCH(x, grid, MatchOptions(0.75, 2, 2, by_distance=by_distance))
        found = match(*(one.unflatten(2, (3, 4)) for one in (k, v)), Layout(grid), MergeRule(**options, metric=metric))
        assert torch.equal(found.group, expected.group)


@pytest.mark.parametrize("metric", METRICS)
def test_blocks_without_self_attention_are_left_alone_and_named(metric):
    """Their first attention looks at the prompt too, as in the four times upscaler: its keys are no metric."""
    model = fixed(unet(only_cross_attention=True, cross_attention_dim=48))
    x, text = torch.randn(1, 4, 32, 32), torch.randn(1, 7, 48)
    plain = call_unet(model, x, 5, text)
    with tome_core.patch(model, side="kv", ratio=0.75, metric=metric) as handle:
        assert torch.equal(call_unet(model, x, 5, text), plain)
    assert list(handle.report().levels[0].reasons) == ["attn: keys and values are not the picture's tokens"]
