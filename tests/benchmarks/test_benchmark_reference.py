"""The reference code of the benchmark: laws of its groups, and agreement with the engine and tomesd where they can."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import tomesd
import torch
import torch.nn.functional as F

import tome_core
from benchmarks import attention_work, reference, reference_tiles, variants
from benchmarks.networks import UNET
from benchmarks.reference_patch import Grouping, Phase, Recipe, Reference
from benchmarks.variant_list import VARIANTS
from demo import model
from tests import tiny_scenes
from tests.thoroughness import some_quick
from tome_core.merging.grid import Grid
from tome_core.merging.methods import METHODS, MatchOptions

SIDE, CHANNELS = tiny_scenes.SIDE, 24


def tokens(seed: int = 0, batch: int = 2) -> torch.Tensor:
    return torch.randn(batch, SIDE * SIDE, CHANNELS, generator=torch.Generator().manual_seed(seed))


def rand(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@functools.cache
def small_model() -> model.SceneModel:
    """Random weights, and self-attention strong enough that merging matters."""
    made = tiny_scenes.make()
    for name, weights in made.named_parameters():
        if "attn1.to_out" in name:
            torch.nn.init.normal_(weights, std=0.5, generator=rand(2))
    return made


@torch.inference_mode()
def predict(time: int = 300) -> torch.Tensor:
    noise = torch.randn(2, 12, SIDE, SIDE, generator=rand(5))
    return small_model()(noise, torch.full((2,), time), torch.tensor([[0, 5, 9, 12, 15, 20]] * 2))


def early_and_late() -> torch.Tensor:
    """Weak strengths leave late steps alone."""
    return torch.stack([predict(800), predict()])


def put_on(*phases: Phase) -> Reference:
    return Reference(small_model().unet, phases, seed=3)


GROUPINGS = {
    "match": lambda x: reference.bipartite(x, 0.6),
    "drawn": lambda x: reference.bipartite(x, 0.6, destinations_from=rand(1)),
    "random partners": lambda x: reference.bipartite(x, 0.9, 4, partners_from=rand(1)),
    "windows": lambda x: reference.bipartite(x, 0.9, 4, window=8),
    "by distance": lambda x: reference.bipartite(x, 0.7, euclid=True),
    "squares": lambda x: reference.pooled(x, 4),
    "k-means": lambda x: reference.refined(reference.bipartite(x, 0.9, 4), x, 3),
}


@pytest.mark.parametrize("name", GROUPINGS)
def test_every_token_is_in_one_group_and_constants_survive(name):
    x = tokens()
    groups = GROUPINGS[name](x)
    assert torch.equal(groups.sizes.sum(1), torch.full((2,), float(SIDE * SIDE)))
    constant = torch.full_like(x, 0.25)
    assert torch.allclose(groups.unmerge(groups.merge(constant)), constant)
    again = groups.unmerge(groups.merge(x))
    assert torch.allclose(groups.unmerge(groups.merge(again)), again, atol=1e-6)


@pytest.mark.parametrize("ratio", [0.25, 0.5, 0.75])
@pytest.mark.parametrize("cell", [2, 4])
def test_matching_finds_what_the_engine_finds(ratio, cell):
    x = tokens()
    plan = METHODS["bipartite"].match(x, Grid(SIDE, SIDE), MatchOptions(ratio, cell, cell))
    groups = reference.bipartite(x, ratio, cell)
    assert groups.count == plan.num_groups
    assert torch.allclose(groups.unmerge(groups.merge(x)), plan.unmerge(plan.merge(x)), atol=1e-6)
    assert torch.equal(groups.sizes.sort().values, plan.sizes.float().sort().values)


def test_squares_group_what_the_engines_downsampling_groups():
    x = tokens()
    plan = METHODS["downsample"].match(x, Grid(SIDE, SIDE), MatchOptions(0.75, 2, 2))
    assert torch.equal(reference.pooled(x, 2).group, plan.group.expand(2, -1))


@pytest.mark.parametrize("euclid", [False, True])
def test_k_means_brings_tokens_nearer_to_their_groups(euclid):
    x = tokens()
    points = x if euclid else F.normalize(x, dim=-1)
    groups, before = reference.bipartite(x, 0.9, 4, euclid=euclid), None
    for _ in range(4):
        apart = (points - groups.unmerge(groups.merge(points))).square().sum().item()
        assert before is None or apart < before
        groups, before = reference.refined(groups, x, 1, euclid=euclid), apart


def test_partners_stay_inside_their_window():
    groups = reference.bipartite(tokens(), 0.9375, 4, window=8).group
    place = torch.arange(SIDE * SIDE)
    window = place // SIDE // 8 * 2 + place % SIDE // 8
    for row in groups:
        for number in row.unique():
            assert len(window[row == number].unique()) == 1


@pytest.mark.parametrize("tiles", [1, 2, 4])
def test_tiles_are_squares_of_the_grid_and_come_together_again(tiles):
    grid = torch.arange(SIDE * SIDE, dtype=torch.float32).view(1, -1, 1).repeat(3, 1, 2)
    cut = reference_tiles.split(grid, tiles)
    assert cut.shape == (3 * tiles**2, (SIDE // tiles) ** 2, 2)
    assert torch.equal(reference_tiles.join(cut, tiles), grid)
    first = grid[0, :, 0].view(SIDE, SIDE)[:SIDE // tiles, :SIDE // tiles]
    assert torch.equal(cut[0, :, 0].view_as(first), first)


def test_one_tile_is_the_unmerged_model_and_more_keep_what_they_cannot_see_apart():
    plain = predict()
    with put_on(Phase(0, Recipe(tiles=1))):
        assert torch.equal(predict(), plain)
    attention = small_model().unet.down_blocks[0].attentions[0].transformer_blocks[0].attn1
    x = torch.randn(1, SIDE * SIDE, 32, generator=rand(0))
    other = x.clone()
    other[:, 0] += 1
    with put_on(Phase(0, Recipe(tiles=2))), torch.inference_mode():
        changed = (attention(other) - attention(x)).abs().amax((0, 2)).view(SIDE, SIDE) > 0
    half = SIDE // 2
    assert changed[:half, :half].all() and changed.sum() == half**2


def test_a_grid_that_tiles_do_not_divide_is_refused():
    with pytest.raises(ValueError, match="256 tokens are no square grid that cells of 3x3 divide"):
        reference_tiles.split(tokens(), 3)


@pytest.mark.parametrize(("name", "early", "late"), [
    ("tomesd-early-and-late-0.75-then-0.35", variants.tomesd(0.75), variants.tomesd(0.35)),
    ("downsample-early-and-late-8x8-then-2x2", variants.engine(
        {"method": "downsample", "sx": 8, "sy": 8, "proportional": False}), VARIANTS["downsample-2x2"].put_on),
])  # fmt: skip
def test_a_schedule_is_its_early_method_down_to_half_time_and_then_its_late_one(name, early, late):
    unet = small_model().unet
    for time, alone in ((999, early), (500, early), (499, late), (0, late)):
        with alone(unet, 3):
            wanted = predict(time)
        with VARIANTS[name].put_on(unet, 3):
            assert torch.equal(predict(time), wanted)


def test_random_partners_ignore_the_tokens():
    first, second = (reference.bipartite(tokens(seed), 0.75, partners_from=rand(1)).group for seed in (0, 1))
    assert torch.equal(first, second)
    assert not torch.equal(first, reference.bipartite(tokens(), 0.75, partners_from=rand(2)).group)


def test_a_grid_that_cells_do_not_divide_is_refused():
    with pytest.raises(ValueError, match="255 tokens are no square grid"):
        reference.bipartite(tokens()[:, 1:], 0.5)


BOTH_HAVE = [
    ({"ratio": 0.75, "side": "kv"}, Recipe(Grouping(0.75))),
    ({"ratio": 0.9, "sx": 4, "sy": 4, "side": "kv"}, Recipe(Grouping(0.9, 4))),
    ({"ratio": 0.75}, Recipe(Grouping(0.75), together=True)),
    ({"ratio": 0.75, "side": "kv", "query_ratio": 0.5}, Recipe(Grouping(0.75), Grouping(0.5))),
    # the engine refuses it without sizes, because it may leave groups empty
    ({"ratio": 0.9, "sx": 4, "sy": 4, "side": "kv", "refine": 3}, Recipe(Grouping(0.9, 4, steps=3))),
]


@pytest.mark.parametrize(("settings", "recipe", "sized"), [
    (*both, sized) for both in BOTH_HAVE for sized in (True, False) if sized or "refine" not in both[0]
])  # fmt: skip
def test_in_a_unet_the_reference_predicts_what_the_engine_predicts(settings, recipe, sized):
    config = tome_core.MergeConfig(use_rand=False, proportional=sized, correction=False, **settings)
    with tome_core.patch(small_model().unet, config):
        theirs = predict()
    with put_on(Phase(0, replace(recipe, sized=sized))):
        ours = predict()
    assert (ours - theirs).abs().max() < 1e-5 < 1e-2 < (ours - predict()).abs().max()


def test_in_a_unet_a_schedule_of_the_reference_is_one_of_the_engine():
    both = {"side": "kv", "use_rand": False, "correction": False}
    early, late = {"ratio": 0.9, "sx": 4, "sy": 4, **both}, {"ratio": 0.5, **both}
    rules = tome_core.MergeRule(min_timestep=600, **early), tome_core.MergeRule(**late)
    for time in (900, 600, 599, 10):
        with tome_core.patch(small_model().unet, tome_core.MergeConfig(rules=rules)):
            theirs = predict(time)
        with put_on(Phase(600, Recipe(Grouping(0.9, 4))), Phase(0, Recipe(Grouping(0.5)))):
            assert (predict(time) - theirs).abs().max() < 1e-5


def test_in_a_unet_the_reference_predicts_what_tomesd_predicts():
    with put_on(Phase(0, Recipe(Grouping(0.5), together=True, sized=False))):
        ours = predict()
    tomesd.apply_patch(small_model().unet, ratio=0.5, use_rand=False)
    try:
        theirs = predict()
    finally:
        tomesd.remove_patch(small_model().unet)
    assert (ours - theirs).abs().max() < 1e-5


def test_sizes_make_copies_of_a_key_weigh_as_much_as_the_copies():
    """Where the tokens of a cell are equal, merging keys by size is exact, and merging without sizes is not."""
    attention = small_model().unet.down_blocks[0].attentions[0].transformer_blocks[0].attn1
    few = torch.randn(1, 2, 32, generator=rand(0))
    copies = few[:, [0, 0, 0, 0, 0, 0, 1, 1]]
    groups = reference.Groups(torch.tensor([[0, 0, 0, 0, 0, 0, 1, 1]]), 2)
    with torch.inference_mode():
        exact = attention(copies)
        mask = groups.log_sizes()[:, None]
        sized = attention(copies, encoder_hidden_states=groups.merge(copies), attention_mask=mask)
        unsized = attention(copies, encoder_hidden_states=groups.merge(copies))
    assert torch.allclose(sized, exact, atol=1e-5)
    assert not torch.allclose(unsized, exact, atol=1e-3)


def test_phases_follow_the_time():
    early, late = Recipe(zero=True), Recipe(Grouping(0.75))
    for time, recipe in ((900, early), (600, early), (599, late), (0, late)):
        with put_on(Phase(0, recipe)):
            alone = predict(time)
        with put_on(Phase(600, early), Phase(0, late)):
            assert torch.equal(predict(time), alone)
    plain = predict(100)
    with put_on(Phase(600, early)):
        assert torch.equal(predict(100), plain)


@pytest.mark.parametrize("name", some_quick((name for name, one in VARIANTS.items() if UNET in one.kinds), 20))
def test_a_variant_is_the_same_each_time_and_leaves_nothing_behind(name):
    unet = small_model().unet
    plain, state, keys = early_and_late(), torch.get_rng_state(), list(unet.state_dict())
    kinds = [(type(module), len(module._forward_hooks) + len(module._forward_pre_hooks), set(vars(module)))
             for module in unet.modules()]  # fmt: skip
    made = []
    for _ in range(2):
        with VARIANTS[name].put_on(unet, 3):
            made.append(early_and_late())
    assert torch.equal(made[0], made[1])
    assert torch.equal(early_and_late(), plain) and torch.equal(torch.get_rng_state(), state)
    assert list(unet.state_dict()) == keys
    assert kinds == [(type(module), len(module._forward_hooks) + len(module._forward_pre_hooks), set(vars(module)))
                     for module in unet.modules()]  # fmt: skip
    differs = not torch.equal(made[0], plain)
    assert differs == (name not in ("unmerged", "twice-the-solver-steps"))


@pytest.mark.parametrize(("name", "share"), [
    ("unmerged", 1), ("zero-attention", 0), ("bfloat16", 1), ("tomesd-0.5", 1 / 4), ("bipartite-0.75", 1 / 16),
    ("cluster-0.5", 1 / 4), ("bipartite-kv-0.75", 1 / 4), ("downsample-2x2", 1 / 4), ("sized-kv-0.75", 1 / 4),
    ("sized-kv-on-keys-0.75", 1 / 4), ("sized-0.75", 1 / 16), ("mean-kv-4x4", 1 / 16), ("tiles-2x2", 1 / 4),
    ("tiles-4x4", 1 / 16),
])  # fmt: skip
def test_the_work_left_is_counted_whoever_merges(name, share):
    unet = small_model().unet
    with attention_work.counting(unet) as work, VARIANTS[name].put_on(unet, 0):
        predict()
    assert work.share() == pytest.approx(share, abs=1e-12)


def test_the_work_of_a_schedule_is_that_of_its_times():
    unet = small_model().unet
    phases = Phase(600, Recipe(Grouping(0.75))), Phase(0, Recipe(Grouping(0.5)))
    with attention_work.counting(unet) as work, put_on(*phases):
        predict(900), predict(100), predict(50)
    assert work.share() == pytest.approx((1 / 4 + 1 / 2 + 1 / 2) / 3)
