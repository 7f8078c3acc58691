"""What a match compares: from the block's input to its keys and values, by cosine or by distance."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from torch import nn

import tome_core
from benchmarks.sd_block import make_block, make_inputs
from tests.families import every_family_in_time, largest_difference
from tests.models import BY_NAME, call_case, call_unet, fixed, unet
from tome_core import PRESETS, MergeConfig
from tome_core.merging.grid import Grid
from tome_core.merging.methods import METHODS, MatchOptions
from tome_core.merging.methods.bipartite import best_destination, refine_plan
from tome_core.merging.metric import METRICS, tokens_to_compare

MATCH = METHODS["bipartite"].match


def tokens(batch: int = 2, count: int = 64, channels: int = 6, seed: int = 0) -> torch.Tensor:
    return torch.randn(batch, count, channels, generator=torch.Generator().manual_seed(seed))


def test_the_nearest_destination_is_the_one_of_least_distance():
    x = tokens() + 3  # an offset, which a dot product alone would follow
    destinations, sources = torch.arange(0, 64, 4)[None], torch.arange(1, 64, 4)[None]
    found = best_destination(x, sources, destinations, by_distance=True)
    apart = torch.cdist(x[:, sources[0]].double(), x[:, destinations[0]].double())
    assert torch.equal(found.index, apart.argmin(-1))
    assert largest_difference(found.score, (-apart.amin(-1) ** 2 / 2).float()) < 1e-4


def test_those_merge_whose_partner_is_nearest():
    x = tokens() * torch.linspace(0.1, 3, 64)[:, None]
    plan = MATCH(x, Grid(8, 8), MatchOptions(0.25, 2, 2, by_distance=True))
    merged, apart = plan.merge(x), []
    for sample in range(2):
        centre = plan.representative[sample][plan.group[sample]]
        apart.append((x[sample] - x[sample][centre]).norm(dim=-1))
        alone = [t for t in range(64) if centre[t] == t and plan.sizes[sample][plan.group[sample][t]] == 1]
        cells = [t for t in alone if (t // 8) % 2 or t % 2]  # sources that stayed by themselves
        kept_away = torch.cdist(x[sample][cells], x[sample][plan.representative[sample][:16]]).amin(-1)
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


@pytest.fixture(scope="module")
def block() -> nn.Module:
    return make_block().input_blocks[0][0].transformer_blocks[0]


def test_metrics_are_what_they_are_called(block):
    x = tokens(2, 16, 320)
    normed = block.norm1(x)
    assert tokens_to_compare(block, x, "input") is x
    keys, both = tokens_to_compare(block, x, "keys"), tokens_to_compare(block, x, "keys+values")
    assert largest_difference(both[..., :320], keys) < 1e-5 and both.shape == (2, 16, 640)
    true = block.attn1.to_k(normed)
    ratio = torch.cdist(keys, keys) / torch.cdist(true, true)  # the same distances, but for one factor a sample
    off = ~torch.eye(16, dtype=torch.bool)
    for sample in ratio:
        assert sample[off].max() / sample[off].min() - 1 < 1e-3


def test_keys_and_values_count_alike_whatever_their_scale(block):
    x = tokens(1, 64, 320)
    both = tokens_to_compare(block, x, "keys+values")
    for half in both.split(320, -1):
        assert abs(half.pow(2).mean().item() - 1) < 1e-4 and half.mean(1).abs().max() < 1e-5


def test_a_sample_is_compared_as_it_would_be_alone(block):
    x = tokens(3, 16, 320)
    together, alone = (tokens_to_compare(block, one, "keys+values") for one in (x, x[1:2]))
    assert largest_difference(together[1:2], alone) < 1e-5


def test_a_block_of_another_kind_is_compared_as_far_as_it_goes(block):
    x, odd = tokens(1, 16, 320), nn.Module()
    odd.attn1 = nn.Identity()
    assert tokens_to_compare(odd, x, "keys+values") is x
    odd.norm1 = nn.LayerNorm(320)
    assert torch.equal(tokens_to_compare(odd, x, "keys+values"), odd.norm1(x))


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


def test_other_methods_look_at_their_own():
    case, pictures = BY_NAME["sd15"], []
    for metric in ("input", "keys+values"):
        with tome_core.patch(case.build(), method="cluster", metric=metric) as handle:
            pictures.append(call_case(case, handle.unet))
    assert torch.equal(*pictures)
