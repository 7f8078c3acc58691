"""Laws of matches, of what they compare, and of a grid's cells and windows, against slow and obvious versions."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from tomesd.merge import bipartite_soft_matching_random2d

from tome_core import MergePlan, MergeRule
from tome_core.engine.match import match as match_heads
from tome_core.merging.grid import WINDOW, Draw, Grid, Layout, cells, draw_choices, split_grid, windows
from tome_core.merging.methods import METHODS, MatchOptions, base
from tome_core.merging.methods.bipartite import refine_plan
from tome_core.merging.methods.cluster import ITERATIONS
from tome_core.merging.metric import METRICS, of_unit_spread

GRIDS = [(1, 1), (1, 16), (16, 1), (2, 2), (3, 5), (7, 4), (5, 9), (8, 8), (3, 3)]
every_method = pytest.mark.parametrize("name", METHODS)


def match(name, x, grid, *, ratio=0.5, sx=2, sy=2, draw=None, refine=0):
    return METHODS[name].match(x, Grid(*grid), MatchOptions(ratio, sx, sy, draw, refine))


def tokens(grid, batch=2, channels=6, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, grid[0] * grid[1], channels, generator=generator)


def k_means(x, groups, count, steps, by_distance):
    """K-means on ``[N, C]``, or on its directions, from a grouping; a group that loses its tokens stays empty."""
    x = x.double() if by_distance else F.normalize(x.double(), dim=-1)
    for _ in range(steps):
        members = [[i for i, group in enumerate(groups) if group == number] for number in range(count)]
        centres = {number: x[indices].mean(0) for number, indices in enumerate(members) if indices}
        if not by_distance:
            centres = {number: F.normalize(centre, dim=0) for number, centre in centres.items()}
        groups = [min(centres, key=lambda number: float((centres[number] - token).norm())) for token in x]
    return groups


@every_method
def test_every_token_is_in_one_group_and_no_group_is_empty(name):
    strides = [(1, 1), (2, 2), (4, 4), (3, 2), (1, 8)]
    for stride, grid, ratio in itertools.product(strides, GRIDS, [0.0, 0.1, 0.5, 0.75, 1.0]):
        case, tokens_there = f"{grid}, cells {stride}, ratio {ratio}", grid[0] * grid[1]
        plan = match(name, tokens(grid), grid, ratio=ratio, sx=stride[0], sy=stride[1], draw=Draw(1, 0, None))
        if plan is None:  # nothing to merge; off is None, never an identity plan
            cell = min(stride[0], grid[1]) * min(stride[1], grid[0])
            assert int(tokens_there * ratio) == 0 or (cell == 1 and METHODS[name].keeps_cells) or grid == (1, 1), case
            continue
        assert plan.group.shape[1] == tokens_there and 1 <= plan.num_groups < tokens_there, case
        assert plan.group.min() >= 0 and plan.group.max() < plan.num_groups, case
        assert (plan.sizes >= 1).all() and (plan.sizes.sum(1) == tokens_there).all(), case


@pytest.mark.parametrize("by_distance", [False, True])
@pytest.mark.parametrize("grid, sy, sx", [((8, 8), 2, 2), ((9, 7), 2, 4), ((5, 1), 3, 1), ((3, 5), 1, 2)], ids=str)
def test_bipartite_merges_the_sources_that_are_most_alike_to_their_best_destination(grid, sy, sx, by_distance):
    """The slow version compares all pairs. A token of zeros has similarity 0 to every other."""
    x, width = tokens(grid) * torch.linspace(0.5, 2, grid[0] * grid[1])[:, None] + 0.3, grid[1]
    chosen = [r * sy * width + c * sx for r in range(grid[0] // sy) for c in range(width // sx)]  # top left
    others = [token for token in range(grid[0] * width) if token not in chosen]
    if not by_distance:
        x[:, others[0]] = 0
    if by_distance:
        alike = -torch.cdist(x.double()[:, others], x.double()[:, chosen])
    else:
        alike = F.cosine_similarity(x.double()[:, others, None], x.double()[:, None, chosen], dim=-1)
    removed = max(1, len(others) // 2)
    options = MatchOptions((removed + 0.5) / x.shape[1], sx, sy, by_distance=by_distance)
    plan = METHODS["bipartite"].match(x, Grid(*grid), options)
    best, which = alike.max(2)
    for sample in range(2):
        expected = {tuple(sorted((chosen[which[sample, n]], others[n]))) for n in best[sample].topk(removed).indices}
        group = plan.group[sample].tolist()
        pairs = {tuple(sorted((there, other))) for there in chosen for other in others if group[there] == group[other]}
        assert pairs == expected and plan.num_groups == x.shape[1] - removed


@pytest.mark.parametrize("grid, ratio", [((8, 8), 0.25), ((33, 64), 0.5), ((48, 64), 0.75), ((9, 7), 0.5)], ids=str)
def test_bipartite_agrees_with_tomesd(grid, ratio):
    x, (height, width) = tokens(grid, channels=32), grid
    merge, unmerge = bipartite_soft_matching_random2d(x, width, height, 2, 2, int(x.shape[1] * ratio), no_rand=True)
    plan = match("bipartite", x, grid, ratio=ratio)
    assert plan.num_groups == merge(x).shape[1]
    assert (plan.unmerge(plan.merge(x)) - unmerge(merge(x))).abs().max() <= 1e-6


@pytest.mark.parametrize("steps, ratio, cell, by_distance",
                         [(1, 0.5, 2, False), (3, 0.9375, 4, False), (3, 0.75, 2, True)])  # fmt: skip
def test_refinement_is_k_means_from_the_match(steps, ratio, cell, by_distance):
    x = tokens((8, 8), channels=3) + by_distance
    start, plan = (METHODS["bipartite"].match(x, Grid(8, 8), MatchOptions(ratio, cell, cell, None, many, by_distance))
                   for many in (0, steps))  # fmt: skip
    for sample in range(2):
        expected = k_means(x[sample], start.group[sample].tolist(), start.num_groups, steps, by_distance)
        assert plan.group[sample].tolist() == expected
    assert not torch.equal(plan.group, start.group)


@pytest.mark.parametrize(("x", "start", "by_distance"),
                         [([[1.0, 0.0], [1.0, 0.0], [-1.0, 0.0], [1.0, 0.5]], [0, 0, 0, 2], False),
                          ([[0.0], [0.1], [5.0], [5.1]], [0, 0, 2, 2], True)])  # fmt: skip
def test_a_group_without_tokens_gets_none_though_all_else_be_far(x, start, by_distance):
    """An empty group has no centre: a centre of cosine 0 would be the nearest one to the third token."""
    plan = refine_plan(MergePlan(torch.tensor([start]), 3), torch.tensor([x]), 1, by_distance)
    assert plan.group.tolist() == [[0, 0, 2, 2]]


def test_similarity_is_compared_in_float32_even_under_autocast():
    x = tokens((16, 16), channels=64)
    plain = match("bipartite", x, (16, 16))
    with torch.autocast("cpu", torch.bfloat16):
        under = match("bipartite", x, (16, 16))
    assert torch.equal(plain.group, under.group)


@every_method
def test_tokens_of_zeros_do_no_harm(name):
    x = tokens((8, 8))
    x[:, ::3] = 0
    for case in (x, torch.zeros_like(x)):
        plan = match(name, case, (8, 8))
        assert torch.isfinite(plan.merge(case)).all()
        assert (plan.sizes >= 1).all()  # equal tokens empty clusters, each of which then gets a token


@pytest.mark.parametrize(("name", "ratio"), [("cluster", 0.5), ("cluster", 0.8), ("cluster-similarity", 32 / 36)])
def test_clusters_are_lloyds_algorithm_on_tokens_or_on_their_cosines(name, ratio):
    x = tokens((6, 6), batch=1, channels=3)
    cosine = F.cosine_similarity(x[0], x[0].mean(0, keepdim=True), dim=-1)[:, None]
    values, ordered = (x[0], x[0]) if name == "cluster" else (cosine, cosine.sort(0).values)
    count = 36 - int(36 * ratio)
    first = torch.cdist(values.double(), ordered[[i * 36 // count for i in range(count)]].double()).argmin(1).tolist()
    expected = k_means(values, first, count, ITERATIONS - 1, by_distance=True)
    assert len(set(expected)) == count  # none empty here, so none was given a token
    assert match(name, x, (6, 6), ratio=ratio).group[0].tolist() == expected


def whole_numbers(*shape, seed=0):
    """So few that many products are equal."""
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).float()


@pytest.mark.parametrize("keys, slices", [(1, 1), (7, 3), (96, 1), (96, 5)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_of_keys_with_equal_scores_the_first_is_the_best(has_bias, keys, slices, monkeypatch):
    x, among = whole_numbers(2, 60, 3), whole_numbers(2, keys, 3, seed=1)
    bias = whole_numbers(2, keys, seed=2).masked_fill(torch.arange(keys) == 3, float("-inf")) if has_bias else None
    monkeypatch.setitem(base._SCORE_BYTES, "cpu", 4 * 2 * keys * 60 // slices)
    scores = x @ among.mT + (0 if bias is None else bias[:, None])
    expected = scores.numpy().argmax(2)  # the first of the highest ones
    score, index = base.best_keys(x, None, among, bias)
    assert torch.equal(score, scores.amax(2)) and (index.numpy() == expected).all()
    assert keys == 1 or any((row == row.max()).sum() > 1 for row in scores[0]), "some are equal"


def test_a_query_that_is_no_number_gets_a_key_that_there_is_and_the_others_theirs():
    x, keys = tokens((4, 4)), tokens((3, 3), seed=1)
    _, expected = base.best_keys(x, None, keys)
    x[:, 5] = torch.nan
    _, index = base.best_keys(x, None, keys)
    others = torch.arange(16) != 5
    assert ((index >= 0) & (index < 9)).all() and torch.equal(index[:, others], expected[:, others])


def choices(seed, level, *times, count=1024, dtype=torch.float32):
    return draw_choices(Draw(seed, level, torch.tensor(times, dtype=dtype)), count, 4, torch.device("cpu"))


def test_destinations_depend_on_seed_level_and_time_and_are_spread_evenly_over_the_cell():
    base = choices(1, 0, 500.0)
    assert torch.equal(base, choices(1, 0, 500.3, dtype=torch.float64))
    for other in (choices(2, 0, 500.0), choices(1, 1, 500.0), choices(1, 0, 501.0)):
        assert 0.18 < (other == base).float().mean() < 0.32  # a quarter by chance
    both = choices(1, 0, 500.0, 20.0)
    assert torch.equal(both[:1], base) and not torch.equal(both[1:], base)
    counts = choices(3, 0, *range(50), count=4096).flatten().bincount(minlength=4)
    assert (counts / counts.sum() - 0.25).abs().max() < 0.005


def test_a_draw_that_keeps_its_results_gives_each_grid_and_cell_its_own():
    draw = Draw(1, 0, torch.tensor([500.0]), {})
    grids, sides = (Grid(8, 8), Grid(4, 16), Grid(16, 8, 2)), ((2, 2), (4, 2), (2, 4))
    for _, grid, (sy, sx), st, device in itertools.product(range(2), grids, sides, (1, 2), ("cpu", "meta")):
        x = torch.empty(1, device=device)
        kept, fresh = (split_grid(grid, sy, sx, one, x, st) for one in (draw, draw._replace(known=None)))
        assert kept[0].device == x.device and [part.shape for part in kept] == [part.shape for part in fresh]
        assert device == "meta" or all(map(torch.equal, kept, fresh))


def test_keys_and_values_count_alike_whatever_their_scale_and_every_sample_as_if_alone():
    keys, values = tokens((8, 8), 3, 32), tokens((8, 8), 3, 32, seed=1) * 7 - 3
    both = of_unit_spread(keys, values)
    assert both.shape == (3, 64, 64)
    for half in both.split(32, -1):
        assert (half.pow(2).mean((1, 2)) - 1).abs().max() < 1e-4 and half.mean(1).abs().max() < 1e-5
    torch.testing.assert_close(both[1:2], of_unit_spread(keys[1:2], values[1:2]), rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_constant_keys_or_values_compare_as_zeros(dtype):
    keys, values = tokens((8, 8), 2, 12).to(dtype), torch.full((2, 64, 12), 3.0, dtype=dtype)
    assert not of_unit_spread(keys, values)[..., 12:].any() and not of_unit_spread(values, keys)[..., :12].any()


def test_each_metric_compares_what_it_is_called():
    """Metrics compare keys and values. Attentions do not see the block's input; cosine of keys replaces it."""
    k, v = (tokens((8, 8), 2, 12, seed) + 1 for seed in range(2))
    compared = {"input": (k, False), "keys+values": (of_unit_spread(k, v), True)}
    for metric in METRICS:
        x, by_distance = compared[metric]
        expected = METHODS["bipartite"].match(x, Grid(8, 8), MatchOptions(0.75, 2, 2, by_distance=by_distance))
        rule = MergeRule(ratio=0.75, side="kv", use_rand=False, metric=metric)
        plan = match_heads(*(tensor.unflatten(2, (3, 4)) for tensor in (k, v)), Layout(Grid(8, 8)), rule)
        assert torch.equal(plan.group, expected.group)


@pytest.mark.parametrize("grid", [Grid(3, 5), Grid(67, 131), Grid(256, 256), Grid(13 * 30, 52, 13),
                                  Grid(5 * 90, 160, 5)])  # fmt: skip
def test_windows_cover_the_grid_once(grid):
    frame, end = grid.height // grid.frames * grid.width, 0
    for start, window in windows(grid):
        assert start == end and window.width == grid.width and window.height * window.width <= WINDOW
        whole = window.height * window.width % frame == 0 and window.frames == window.height * window.width // frame
        assert whole or window.frames == 1
        end += window.height * window.width
    assert end == grid.height * grid.width


def test_a_films_cells_hold_tokens_that_are_near_in_time_too():
    members, rest = cells(Grid(4 * 6, 8, frames=4), 2, 4, torch.device("cpu"), st=2)
    assert members.shape == (4 * 6 * 8 // 16, 16) and not len(rest)
    assert sorted(members.flatten().tolist()) == list(range(4 * 6 * 8))
    frame, row, column = members // 48, members % 48 // 8, members % 8
    for place, side in ((frame, 2), (row, 2), (column, 4)):
        assert (place.amax(1) - place.amin(1) == side - 1).all()
