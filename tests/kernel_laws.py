"""Laws of the Triton kernels that match and merge: what torch's operators give, they give.

Run by test_kernels.py and test_on_cuda.py.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests import kernel_harness
from tests.kernel_harness import DEVICE, DTYPES, INF, close, noise, together
from tome_core import MergePlan
from tome_core.merging import kernels
from tome_core.merging.grid import Grid
from tome_core.merging.methods import METHODS, MatchOptions, bipartite
from tome_core.merging.methods.base import best_keys, take_queries
from tome_core.merging.metric import keys_of_rows

used = kernel_harness.used  # a fixture, around every test
# batch, tokens, queries, keys, channels: one tile and less, whole tiles, tails of every axis, a real width
SHAPES = [(1, 1, 1, 1, 1), (3, 80, 64, 64, 32), (2, 200, 130, 65, 33), (1, 70, 5, 130, 320)]


def case(shape, dtype=torch.float32):
    """Rows to take, and directions to compare them with."""
    batch, tokens, queries, keys, channels = shape
    rows = torch.randint(tokens, (1, queries), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    keys = F.normalize(noise(batch, keys, channels, seed=2), dim=-1)
    return (noise(batch, tokens, channels, dtype=dtype), rows), keys


def biases(batch, keys):
    some = noise(batch, keys, seed=3)
    hidden = some.masked_fill(noise(batch, keys, seed=4) > 0, -INF)
    hidden[:, -1] = 0
    return {"no bias": None, "a bias": some, "hidden keys": hidden}


def assert_best(found: tuple, queries: torch.Tensor, keys: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Score and key are the best, compared with the sum in double precision: the key may be another near tie."""
    queries, keys = queries.double(), keys.double()
    scores = queries @ keys.transpose(1, 2) + (0 if bias is None else bias.double()[:, None])
    allowed = 1e-6 * (queries.norm(dim=-1) * keys.norm(dim=-1).amax(-1, keepdim=True) + 1)
    best = scores.amax(-1)
    assert found[0].dtype == torch.float32 and found[1].dtype == torch.int64
    assert ((found[0] - best).abs() <= allowed).all()
    assert (best - scores.gather(2, found[1][..., None])[..., 0] <= allowed).all()


@pytest.mark.parametrize("shape, kind, dtype", together(SHAPES, ["no bias", "a bias", "hidden keys"], DTYPES), ids=str)
def test_the_best_key_is_that_of_the_exact_scores(shape, kind, dtype):
    rows, keys = case(shape, dtype)
    bias = biases(shape[0], shape[3])[kind]
    found = best_keys(*rows, keys, bias)
    assert_best(found, take_queries(*rows, 0, shape[2]), keys, bias)
    with kernels.without():
        plain = best_keys(*rows, keys, bias)
    assert torch.allclose(found[0], plain[0], atol=1e-5)
    keys = keys.to(dtype)  # of the queries' own dtype they are multiplied exactly
    found, exact = (best_keys(*rows, one, bias) for one in (keys, keys.float()))
    assert_best(found, take_queries(*rows, 0, shape[2]), keys, bias)
    assert torch.equal(found[1], exact[1]) and torch.equal(found[0], exact[0])


def test_no_queries_are_no_results(used):
    rows, keys = case((2, 8, 0, 8, 4))
    found = best_keys(*rows, keys)
    assert found[0].shape == found[1].shape == (2, 0)


def test_one_tensor_serves_samples_with_rows_of_their_own():
    x, keys = noise(1, 50, 20), noise(4, 9, 20, seed=1)
    rows = (x, torch.arange(28, device=DEVICE).view(4, 7))
    expected = torch.stack([x[0, 7 * sample + 2 : 7 * sample + 5] for sample in range(4)])
    assert torch.equal(take_queries(*rows, 2, 5), expected)
    assert_best(best_keys(*rows, keys), take_queries(*rows, 0, 7), keys, None)


def test_any_strides_will_do():
    x, keys = noise(2, 40, 70).transpose(1, 2), noise(1, 33, 80, seed=1)[..., ::2].expand(2, -1, -1)
    bias = noise(66, seed=2)[::2].expand(2, -1)
    rows = torch.arange(69, -1, -1, device=DEVICE)[None, ::2].expand(2, -1)
    queries = (x, rows)
    assert not x.is_contiguous() and x.shape == (2, 70, 40)
    assert_best(best_keys(*queries, keys, bias), take_queries(*queries, 0, 35), keys, bias)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_of_equal_scores_the_first_wins(dtype):
    one = noise(1, 90, 16).round().to(dtype)  # whole numbers: sums are equal in whatever order
    twice = torch.cat([one, one], 1).float()  # equal keys in one tile and in two
    found = best_keys(one, None, twice)
    with kernels.without():
        assert torch.equal(found[1], best_keys(one, None, one.float())[1])


def test_a_row_of_zeros_takes_the_first_key_that_is_not_hidden():
    keys, bias = noise(1, 70, 8), torch.zeros(1, 70, device=DEVICE)
    bias[:, :66] = -INF
    zeros = (torch.zeros(1, 3, 8, device=DEVICE), None)
    assert best_keys(*zeros, keys)[1].tolist() == [[0, 0, 0]]
    found = best_keys(*zeros, keys, bias)
    assert found[1].tolist() == [[66, 66, 66]] and found[0].tolist() == [[0, 0, 0]]


def test_where_all_keys_are_hidden_the_answer_is_torchs():
    rows, keys = case((1, 9, 3, 70, 8))
    bias = torch.full((1, 70), -INF, device=DEVICE)
    found = best_keys(*rows, keys, bias)
    assert found[0].tolist() == [[-INF] * 3] and found[1].tolist() == [[0] * 3]


def test_a_query_that_is_no_number_gets_a_key_there_is_and_harms_no_other():
    rows, keys = case(SHAPES[2])
    clean = best_keys(*rows, keys)
    rows[0][:, rows[1][0, 3]] = float("nan")
    found = best_keys(*rows, keys)
    others = (rows[1] != rows[1][0, 3]).expand(2, -1)
    assert ((found[1] >= 0) & (found[1] < 65)).all()
    assert torch.equal(found[1][others], clean[1][others])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_querys_result_has_the_same_bits_alone_as_among_others(dtype):
    rows, keys = case(SHAPES[2], dtype)
    if kernel_harness.INTERPRETED:  # numpy's sums may depend on a row's place: those of whole numbers do not
        rows, keys = (rows[0].round(), rows[1]), (keys * 8).round()
    together, again = best_keys(*rows, keys), best_keys(*rows, keys)
    alone = best_keys(rows[0][1:], rows[1][:, 70:80], keys[1:])
    for one, same, few in zip(together, again, alone, strict=True):
        assert torch.equal(one, same) and torch.equal(one[1:, 70:80], few)


@pytest.mark.parametrize("method, more", [("bipartite", {}), ("bipartite", {"refine": 1}), ("cluster", {})])
def test_a_match_is_as_good_as_that_of_torchs_operators(method, more):
    x, options = noise(2, 64, 40, dtype=torch.float16), MatchOptions(0.5, 2, 2, **more)
    plan = METHODS[method].match(x, Grid(8, 8), options)
    with kernels.without():
        plain = METHODS[method].match(x, Grid(8, 8), options)
        errors = [(one.unmerge(one.merge(x)) - x).float().norm().item() for one in (plan, plain)]
    assert errors[0] == pytest.approx(errors[1], rel=1e-3)


# how the groups of 150 tokens are made: some groups empty, one that holds all, sizes around the kernels' rows
GROUPS = {
    "random": lambda: torch.randint(40, (2, 150), generator=torch.Generator().manual_seed(5)),
    "all in the last": lambda: torch.full((2, 150), 39),
    "one map for all": lambda: torch.randint(3, (1, 150), generator=torch.Generator().manual_seed(5)) * 7,
    "sizes 15, 16, 17": lambda: torch.arange(12).repeat_interleave(torch.tensor([15, 16, 17]).repeat(4))[None, :150],
    "sizes 31, 32, 33": lambda: torch.arange(5).repeat_interleave(torch.tensor([31, 32, 33, 31, 32]))[None, :150],
}


@pytest.mark.parametrize(
    "groups, dtype, channels",
    [*together(list(GROUPS), DTYPES, [40]), ("random", torch.float16, 1), ("random", torch.float16, 300)],
)
def test_means_are_those_of_torchs_operators(groups, dtype, channels):
    plan, x = MergePlan(GROUPS[groups]().to(DEVICE), 40), noise(2, 150, channels, dtype=dtype)
    found = plan.merge(x)
    with kernels.without():
        plain = plan.merge(x)
    assert found.dtype == dtype and found.shape == plain.shape
    last_bits = 2 * torch.finfo(dtype).eps
    assert torch.allclose(found.float(), plain.float(), atol=last_bits, rtol=last_bits)
    assert (found[(plan.sizes == 0).expand(2, -1)] == 0).all()
    assert torch.equal(plan.merge(x), found)


def test_means_of_halves_are_summed_in_float32():
    x = torch.full((1, 1024, 4), 1000.0, dtype=torch.float16, device=DEVICE)
    assert (MergePlan(torch.zeros(1, 1024, dtype=torch.int64, device=DEVICE), 1).merge(x) == 1000).all()


def test_means_of_tensors_that_lie_otherwise_in_memory():
    plan, x = MergePlan(GROUPS["random"]().to(DEVICE), 40), noise(2, 20, 150)
    assert torch.equal(plan.merge(x.transpose(1, 2)), plan.merge(x.transpose(1, 2).contiguous()))


def test_where_a_gradient_is_asked_for_torchs_operators_give_it(used):
    plan, x = MergePlan(GROUPS["random"]().to(DEVICE), 40), noise(2, 150, 6).requires_grad_()
    weight = noise(2, 40, 6, seed=1)
    (plan.merge(x) * weight).sum().backward()
    assert "mean_rows" not in used
    shares = plan.unmerge(weight / plan.sizes.clamp(min=1)[..., None])
    assert torch.allclose(x.grad, shares, atol=1e-6)
    with torch.no_grad():
        plan.merge(x)
    assert used[-1] == "mean_rows"


COUNTS = {  # rows, tokens, groups: one of each, tails of both tiles, more groups than tokens, many tiles
    "one": (1, 1, 1), "tails": (2, 2100, 33), "more groups": (1, 20, 70), "whole tiles": (3, 1024, 32),
}  # fmt: skip


@pytest.mark.parametrize("rows, tokens, groups", COUNTS.values(), ids=COUNTS)
def test_counting_gives_what_sorting_gives(rows, tokens, groups, used):
    group = torch.randint(groups, (rows, tokens), generator=torch.Generator().manual_seed(3)).to(DEVICE)
    plan = MergePlan(group, groups)
    found = (*plan._sort(torch.bfloat16), plan.sizes, plan.empty)
    rounded, logs = plan.logits_in(torch.bfloat16), plan.logits_in(torch.float32)
    assert used == ["segments"], "one launch for all of it"
    with kernels.without():
        other = MergePlan(group, groups)
        assert all(map(torch.equal, found, (*other._sort(), other.sizes, other.empty)))
        torch.testing.assert_close(logs, other.logits_in(torch.float32), rtol=1e-6, atol=1e-6)
    close(rounded, logs, torch.bfloat16)  # the interpreter cuts digits off where a GPU rounds


def test_beyond_its_bound_counting_leaves_it_to_sorting(monkeypatch, used):
    monkeypatch.setattr(kernels, "_COUNTED_UP_TO", 599)
    plan = MergePlan(torch.zeros(1, 60, dtype=torch.int64, device=DEVICE), 10)
    assert plan.merge(noise(1, 60, 3)).shape == (1, 10, 3)
    assert used == ["mean_rows"]


@pytest.mark.parametrize("dtype, channels", together(DTYPES, [5, 1100]), ids=str)
def test_centres_know_their_lengths_and_which_are_empty(dtype, channels):
    plan, x = MergePlan(GROUPS["one map for all"]().to(DEVICE), 40), noise(3, 150, channels, dtype=dtype)
    mean, bias = plan.centres(x)
    assert torch.equal(bias == -INF, plan.empty.expand(3, -1))
    lengths = mean.double().square().sum(-1) / -2
    torch.testing.assert_close(bias.double()[~plan.empty.expand(3, -1)], lengths[~plan.empty.expand(3, -1)],
                               rtol=1e-5, atol=1e-6)  # fmt: skip


@pytest.mark.parametrize("dtype, channels", together(DTYPES, [5, 300]), ids=str)
def test_keys_and_values_are_merged_at_once_as_each_alone(dtype, channels, used):
    plan, both = MergePlan(GROUPS["random"]().to(DEVICE), 40), noise(2, 150, 2 * channels, dtype=dtype)
    keys, values = both.chunk(2, -1)
    of_keys, of_values, exact = plan.merge_pair(keys, values, exact=True)
    assert used.count("mean_rows") == 1 and all(one.is_contiguous() for one in (of_keys, of_values, exact))
    assert torch.equal(of_keys, plan.merge(keys)) and torch.equal(of_values, plan.merge(values))
    assert exact.dtype == torch.float32
    close(of_values, exact, dtype)
    assert torch.equal(exact, plan.merge(values.float()))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_are_found_as_centres_without_being_copied_first(dtype):
    x, rows = noise(2, 60, 21, dtype=dtype), torch.tensor([[59, 0, 7]], device=DEVICE)
    keys, bias = keys_of_rows(x, rows, True)
    assert torch.equal(keys, x[:, rows[0]])
    torch.testing.assert_close(bias, x[:, rows[0]].float().square().sum(-1) / -2, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_score_can_know_its_querys_length(dtype):
    rows, keys = case(SHAPES[2], dtype)
    plain = best_keys(*rows, keys)
    score, index = kernels.best_keys(*rows, keys, None, lengths=True)
    lengths = take_queries(*rows, 0, 130).square().sum(-1)
    assert torch.equal(index, plain[1])
    torch.testing.assert_close(score, plain[0] - lengths / 2, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("removed", [1, 150, 299])
@pytest.mark.parametrize("samples", [1, 2])
def test_tokens_are_placed_as_torch_places_them(removed, samples):
    score = noise(2, 300, seed=5).round(decimals=1)  # some are equal
    score[0, 7], score[1, 9:12] = float("nan"), torch.tensor([INF, -INF, -0.0], device=DEVICE)
    tokens = torch.stack([torch.randperm(340, generator=torch.Generator().manual_seed(n)) for n in range(samples)])
    sources, destinations = tokens.to(DEVICE).expand(2, -1).split([300, 40], 1)
    index = torch.randint(40, (2, 300), generator=torch.Generator().manual_seed(3)).to(DEVICE)
    plan = bipartite._plan(score, index, sources, destinations, removed)
    with kernels.without():
        plain = bipartite._plan(score, index, sources, destinations, removed)
    assert torch.equal(plan.group, plain.group) and plan.num_groups == plain.num_groups
