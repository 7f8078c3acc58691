"""Laws of the Triton kernels, each launch of which `kernel_harness.used` compares with torch's operators.

Here are the shapes to launch, and what a comparison does not see: bits, ties, numbers that are none, gradients.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests import kernel_harness
from tests.kernel_harness import DEVICE, DTYPES, INF, noise, together, whole_numbers
from tome_core import MergePlan
from tome_core.attention.correction import Correction, fit_correction
from tome_core.attention.merged import add_correction
from tome_core.merging import kernels
from tome_core.merging.methods import bipartite
from tome_core.merging.methods.base import best_keys
from tome_core.merging.metric import keys_of_rows

used = kernel_harness.used  # a fixture, around every test
# batch, tokens, queries, keys, channels: one tile and less, whole tiles, tails of every axis, a real width
SHAPES = [(1, 1, 1, 1, 1), (3, 80, 64, 64, 32), (2, 200, 130, 65, 33), (1, 70, 5, 130, 320)]


def case(shape, dtype=torch.float32):
    """Tokens, which of them are queries, and keys: directions to compare them with."""
    batch, tokens, queries, keys, channels = shape
    rows = whole_numbers(tokens, 1, queries, seed=1)
    return noise(batch, tokens, channels, dtype=dtype), rows, F.normalize(noise(batch, keys, channels, seed=2), dim=-1)


def biases(batch, keys):
    some = noise(batch, keys, seed=3)
    hidden = some.masked_fill(noise(batch, keys, seed=4) > 0, -INF)
    hidden[:, -1] = 0
    return {"no bias": None, "a bias": some, "hidden keys": hidden}


# --- best_keys --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape, kind, dtype", together(SHAPES, ["no bias", "a bias", "hidden keys"], DTYPES), ids=str)
def test_the_best_key_is_the_same_if_lengths_count_and_keys_of_the_queries_own_dtype_are_multiplied_exactly(
    shape, kind, dtype
):
    x, rows, keys = case(shape, dtype)
    bias = biases(shape[0], shape[3])[kind]
    assert torch.equal(kernels.best_keys(x, rows, keys, bias, lengths=True)[1], best_keys(x, rows, keys, bias)[1])
    keys = keys.to(dtype)
    assert all(map(torch.equal, best_keys(x, rows, keys, bias), best_keys(x, rows, keys.float(), bias)))


STRIDED = noise(2, 40, 70).transpose(1, 2), torch.arange(69, -1, -1, device=DEVICE)[None, ::2].expand(2, -1)
ODD = {  # x, rows, keys, bias
    "any strides": (*STRIDED, noise(1, 33, 80, seed=1)[..., ::2].expand(2, -1, -1), noise(66)[::2].expand(2, -1)),
    "one tensor for samples with rows of their own": (
        noise(1, 50, 20), torch.arange(28, device=DEVICE).view(4, 7), noise(4, 9, 20, seed=1), None),
    "no queries": (*case((2, 8, 0, 8, 4)), None),
    "all keys hidden": (*case((1, 9, 3, 70, 8)), torch.full((1, 70), -INF, device=DEVICE)),
}  # fmt: skip


@pytest.mark.parametrize("name", ODD)
def test_odd_inputs_are_answered_as_torch_answers_them(name):
    found = best_keys(*ODD[name])
    with kernels.without():
        plain = best_keys(*ODD[name])
    assert found[1].shape == plain[1].shape
    torch.testing.assert_close(found[0], plain[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_of_equal_scores_the_first_wins(dtype):
    x = noise(1, 90, 16).round().to(dtype)  # whole numbers: sums are equal in whatever order
    x[:, 5] = 0  # a row that is as near to every key
    twice = torch.cat([x, x], 1).float()  # equal keys in one tile and in two
    found = best_keys(x, None, twice)
    with kernels.without():
        assert torch.equal(found[1], best_keys(x, None, x.float())[1])


def test_a_query_that_is_no_number_gets_a_key_there_is_and_harms_no_other():
    x, rows, keys = case(SHAPES[2])
    clean = best_keys(x, rows, keys)
    x[:, rows[0, 3]] = float("nan")
    found = best_keys(x, rows, keys)
    others = (rows != rows[0, 3]).expand(2, -1)
    assert ((found[1] >= 0) & (found[1] < 65)).all()
    assert torch.equal(found[1][others], clean[1][others])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_querys_result_has_the_same_bits_alone_as_among_others(dtype):
    x, rows, keys = case(SHAPES[2], dtype)
    if kernel_harness.INTERPRETED:  # numpy's sums may depend on a row's place: those of whole numbers do not
        x, keys = x.round(), (keys * 8).round()
    among, again = best_keys(x, rows, keys), best_keys(x, rows, keys)
    alone = best_keys(x[1:], rows[:, 70:80], keys[1:])
    for first, same, few in zip(among, again, alone, strict=True):
        assert torch.equal(first, same) and torch.equal(first[1:, 70:80], few)


# --- mean_rows --------------------------------------------------------------------------------------------------------

# how the groups of 150 tokens are made: some groups empty, one that holds all, sizes around the kernels' rows
GROUPS = {
    "random": whole_numbers(40, 2, 150, seed=5),
    "all in the last": torch.full((2, 150), 39),
    "one map for all": whole_numbers(3, 1, 150, seed=5) * 7,
    "sizes 15, 16, 17": torch.arange(12).repeat_interleave(torch.tensor([15, 16, 17]).repeat(4))[None, :150],
    "sizes 31, 32, 33": torch.arange(5).repeat_interleave(torch.tensor([31, 32, 33, 31, 32]))[None, :150],
}


@pytest.mark.parametrize("groups, dtype, channels", together(list(GROUPS), DTYPES, [5, 40, 130]))
def test_keys_and_values_are_merged_at_once_as_each_alone_however_they_lie_in_memory(groups, dtype, channels, used):
    plan, both = MergePlan(GROUPS[groups].to(DEVICE), 40), noise(2, 2 * channels, 150, dtype=dtype).transpose(1, 2)
    keys, values = both.chunk(2, -1)
    of_keys, of_values, exact = plan.merge_pair(keys, values, exact=True)
    assert used.count("mean_rows") == 1 and all(one.is_contiguous() for one in (of_keys, of_values, exact))
    assert torch.equal(of_keys, plan.merge(keys.contiguous())) and torch.equal(of_values, plan.merge(values))
    assert exact.dtype == torch.float32 and torch.equal(exact, plan.merge(values.float()))


def test_torchs_operators_give_a_gradient_that_is_asked_for(used):
    plan, x = MergePlan(GROUPS["random"].to(DEVICE), 40), noise(2, 150, 6).requires_grad_()
    weight = noise(2, 40, 6, seed=1)
    (plan.merge(x) * weight).sum().backward()
    assert "mean_rows" not in used
    shares = plan.unmerge(weight / plan.sizes.clamp(min=1)[..., None])
    assert torch.allclose(x.grad, shares, atol=1e-6)
    with torch.no_grad():
        plan.merge(x)
    assert used[-1] == "mean_rows"


@pytest.mark.parametrize("dtype, channels", together(DTYPES, [5, 1100]), ids=str)
def test_centres_know_their_lengths_and_which_are_empty(dtype, channels):
    plan, x = MergePlan(GROUPS["one map for all"].to(DEVICE), 40), noise(3, 150, channels, dtype=dtype)
    _, bias = plan.centres(x)
    assert torch.equal(bias == -INF, plan.empty.expand(3, -1))
    rows = torch.tensor([[59, 0, 7]], device=DEVICE)
    assert torch.equal(keys_of_rows(x, rows, True)[0], x[:, rows[0]])  # rows are centres of their own


# --- segments and assign_groups ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows, tokens, groups", [(1, 1, 1), (2, 2100, 33), (1, 20, 70), (3, 1024, 32)])
def test_tokens_are_sorted_and_counted_in_one_launch(rows, tokens, groups, used):
    plan = MergePlan(whole_numbers(groups, rows, tokens, seed=3), groups)
    order, _ = plan._sort(torch.bfloat16)
    assert plan.sizes.sum() == len(order) == rows * tokens and torch.equal(plan.empty, plan.sizes == 0)
    for dtype in (torch.bfloat16, torch.float32):
        assert plan.logits_in(dtype).dtype == dtype
    assert used == ["segments"]


@pytest.mark.parametrize("removed, samples", together([1, 150, 299], [1, 2]))
def test_tokens_are_placed_as_torch_places_them(removed, samples):
    score = noise(2, 300, seed=5).round(decimals=1)  # some are equal
    score[0, 7], score[1, 9:12] = float("nan"), torch.tensor([INF, -INF, -0.0], device=DEVICE)
    tokens = torch.stack([torch.randperm(340, generator=torch.Generator().manual_seed(n)) for n in range(samples)])
    sources, destinations = tokens.to(DEVICE).expand(2, -1).split([300, 40], 1)
    given = score, whole_numbers(40, 2, 300, seed=3), sources, destinations, removed
    plan = bipartite._plan(*given)
    with kernels.without():
        plain = bipartite._plan(*given)
    assert torch.equal(plan.group, plain.group) and plan.num_groups == plain.num_groups


def test_beyond_their_bounds_counting_and_comparing_leave_it_to_sorting(monkeypatch, used):
    monkeypatch.setattr(kernels, "_COUNTED_UP_TO", 599)
    monkeypatch.setattr(kernels, "_COMPARED_UP_TO", 99)
    plan = MergePlan(torch.zeros(1, 60, dtype=torch.int64, device=DEVICE), 10)
    assert plan.merge(noise(1, 60, 3)).shape == (1, 10, 3)
    tokens = torch.arange(10, device=DEVICE)[None]
    bipartite._plan(noise(1, 10), tokens * 0, tokens, tokens[:, :1] + 10, 3)
    assert used == ["mean_rows"]


# --- a correction -----------------------------------------------------------------------------------------------------

HEADS = [(1, 3, 40), (2, 16, 70), (3, 40, 130), (1, 64, 1100)]  # heads, width, tokens: one span of them, and three
every_size = pytest.mark.parametrize("dtype, size", together(DTYPES[1:], HEADS), ids=str)


@every_size
def test_a_correction_is_made_in_three_launches_however_keys_and_values_lie_in_memory(size, dtype, used):
    heads, width, tokens = size
    q, k, v = (noise(2, tokens, heads * width, seed=seed) for seed in range(3))
    pair = (k + 3).to(dtype), (v - 2).to(dtype)  # far from zero, as a trained model's are
    asked = q.to(dtype)[:, torch.arange(tokens - 1, -1, -2, device=DEVICE)]
    group = whole_numbers(9, 1, tokens, seed=4)  # group 9 is empty, group 10 has one token
    group[0, 0] = 10
    plan = MergePlan(group, 11)
    correction, merged = fit_correction(asked, pair, plan, heads, width**-0.5)
    assert used[-3:] == ["first_order", "answer_few", "ridge"] and correction.matrix.dtype == dtype
    again, _ = fit_correction(asked, torch.cat(pair, -1).chunk(2, -1), plan, heads, width**-0.5)
    assert all(map(torch.equal, correction[:2], again[:2]))
    assert all(map(torch.equal, merged, plan.merge_pair(*pair)))


@pytest.mark.parametrize("count, dtype", together([3, 32, 77], DTYPES[1:]), ids=str)
def test_a_head_that_lost_nothing_is_given_nothing(count, dtype):
    answers = kernels.Answers(
        noise(6, count, 20, seed=1) * 0.1, noise(4, 6, count, 20, seed=2), noise(4, 6, count, seed=4) * 3
    )
    first = noise(4, 6, 20, 20, seed=3) * 0.02
    first[:, 1] = 0
    for one in kernels.ridge((noise(2, count, 60) + 4).to(dtype), answers, first):
        assert [head.any().item() for head in one] == [True, False, True, True, True, True]


@every_size
def test_a_correction_is_added_in_one_launch_however_heads_lie_in_memory(size, dtype, used):
    heads, width, tokens = size
    q, out = (noise(2, tokens, heads, width, seed=seed, dtype=dtype) for seed in (0, 1))
    correction = Correction(*(noise(2 * heads, rows, width, seed=rows, dtype=dtype) * 0.2 for rows in (2 * width, 1)))
    found = add_correction(out, q, correction)
    assert used == ["correct"] and found.is_contiguous()
    assert torch.equal(found, add_correction(out.transpose(1, 2).contiguous().transpose(1, 2), q, correction))
