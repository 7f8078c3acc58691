"""Laws of the merge plan, over odd shapes, dtypes and group counts."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from tome_core import MergePlan
from tome_core.merging.plan import EMPTY_LOGIT, _segments

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@st.composite
def plans(draw):
    batch = draw(st.integers(1, 3))
    rows = draw(st.sampled_from(sorted({1, batch})))
    tokens, groups = draw(st.integers(1, 40)), draw(st.integers(1, 50))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    group = torch.randint(groups, (rows, tokens), generator=generator)
    x = torch.randn(batch, tokens, draw(st.integers(1, 5)), generator=generator)
    return MergePlan(group, groups), x


@settings(deadline=None, max_examples=60)
@given(plans(), st.sampled_from(DTYPES))
def test_merge_and_unmerge_are_what_loops_over_tokens_give(case, dtype):
    plan, x = case
    x, group = x.to(dtype), plan.group.expand(len(x), -1)
    assert plan.sizes.tolist() == [row.bincount(minlength=plan.num_groups).tolist() for row in plan.group]
    merged, expected = plan.merge(x), torch.zeros(len(x), plan.num_groups, x.shape[2], dtype=torch.float64)
    for sample, own in enumerate(group):
        for number in own.unique():
            expected[sample, number] = x[sample, own == number].double().mean(0)
        assert torch.equal(plan.unmerge(merged)[sample], merged[sample, own])
    assert merged.dtype == dtype
    assert (merged.double() - expected).abs().max() <= torch.finfo(dtype).eps * 4
    flat, (order, offsets) = x.float().flatten(0, 1), plan._flat_segments(len(x))
    sorted_means = F.embedding_bag(order, flat, offsets, mode="mean", include_last_offset=True)  # CUDA's way
    assert torch.allclose(sorted_means, plan.merge(x.float()).flatten(0, 1), atol=1e-6)
    constant = torch.full_like(x, 0.1, dtype=torch.float32)
    assert torch.allclose(plan.unmerge(plan.merge(constant)), constant, atol=1e-7)


def test_an_empty_group_has_mean_zero_size_zero_and_key_logit_minus_infinity():
    plan = MergePlan(torch.tensor([[0, 0, 2]]), 3)
    assert plan.sizes.tolist() == [[2, 0, 1]] and plan.empty.tolist() == [[False, True, False]]
    assert plan.merge(torch.ones(1, 3, 2))[0, 1].tolist() == [0.0, 0.0]
    assert plan.logits_in(torch.float32)[0, 1:].tolist() == [EMPTY_LOGIT, 0.0]


def test_merge_sums_half_precision_in_float32():
    x = torch.full((1, 4096, 64), 1000.0, dtype=torch.float16)  # the sum is beyond half precision, the mean is not
    plan = MergePlan(torch.zeros(1, 4096, dtype=torch.int64), 1)
    assert (plan.merge(x) == x[0, 0]).all()


def test_gradients_of_merge_and_unmerge_are_those_of_the_formula():
    torch.manual_seed(0)
    plan = MergePlan(torch.tensor([[0, 1, 1, 0, 3], [2, 2, 2, 0, 1]]), 4)
    x = torch.randn(2, 5, 3, dtype=torch.float64, requires_grad=True)
    y = torch.randn(2, 4, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(plan.merge, (x,))
    assert torch.autograd.gradcheck(plan.unmerge, (y,))


def test_one_row_is_sorted_once_for_any_number_of_samples(monkeypatch):
    group, calls = torch.tensor([[0, 1, 1, 0, 3]]), []
    plan, whole = MergePlan(group, 4), MergePlan(group.repeat(3, 1), 4)
    monkeypatch.setattr("tome_core.merging.plan._segments", lambda *args: calls.append(args) or _segments(*args))
    for batch in (1, 3, 1):
        expected = whole._sort() if batch == 3 else _segments(group, 4)
        assert all(map(torch.equal, plan._flat_segments(batch), expected))
    assert sum(args[0] is group for args in calls) == 1


@pytest.mark.parametrize("groups", [2**14 - 1, 2**14, 2**14 + 1])
def test_segments_of_as_many_groups_as_a_short_number_holds(groups):
    """Two rows of them: the last that fit 16 bits, and the first that do not."""
    group = torch.stack([torch.arange(groups).flip(0), torch.arange(groups)])
    order, offsets = _segments(group, groups)
    assert torch.equal(offsets, torch.arange(2 * groups + 1))
    assert torch.equal(order, torch.cat([torch.arange(groups).flip(0), groups + torch.arange(groups)]))


def test_a_plan_for_copies_is_that_of_each():
    plan = MergePlan(torch.tensor([[0, 1, 1], [1, 0, 0]]), 2)
    x = torch.randn(4, 3, 2)
    assert torch.equal(plan.repeat(2).merge(x), torch.cat([plan.merge(half) for half in x.chunk(2)]))
    assert plan.repeat(1) is plan
    alone = MergePlan(torch.tensor([[0, 1, 1]]), 2)
    assert alone.repeat(2) is alone, "one row serves any number"


@pytest.mark.parametrize("threads", [1, 2])
def test_equal_inputs_give_equal_bits_on_the_cpu(threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        torch.manual_seed(0)
        group, x = torch.randint(700, (2, 4096)), torch.randn(2, 4096, 320)
        first = MergePlan(group, 700).merge(x)
        assert all(torch.equal(MergePlan(group, 700).merge(x), first) for _ in range(5))
    finally:
        torch.set_num_threads(before)


def test_a_mistake_is_named_with_its_shape_or_value():
    plan, two = MergePlan(torch.tensor([[0, 1, 1, 0]]), 2), torch.zeros(2, 4, dtype=torch.int64)
    mistakes = {
        "int64": lambda: MergePlan(two.float(), 2),
        "[B or 1, N]": lambda: MergePlan(two[0], 2),
        "at least 1": lambda: MergePlan(two, 0),
        "(1, 5, 2)": lambda: plan.merge(torch.zeros(1, 5, 2)),
        "(1, 4, 2)": lambda: plan.unmerge(torch.zeros(1, 4, 2)),
        "(2, 4)": lambda: MergePlan(two, 2).merge(torch.zeros(3, 4, 2)),
    }
    for words, mistake in mistakes.items():
        with pytest.raises(ValueError, match=re.escape(words)):
            mistake()
