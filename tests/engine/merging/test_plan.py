"""Laws of the merge plan, over odd shapes, dtypes and group counts."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from tome_core import MergePlan
from tome_core.merging import plan as plans
from tome_core.merging.plan import EMPTY_LOGIT, _segments

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 3), st.booleans(), st.integers(1, 40), st.integers(1, 50), st.integers(1, 5), st.integers(0, 99),
       st.sampled_from(DTYPES))  # fmt: skip
def test_merge_and_unmerge_are_what_loops_over_tokens_give(batch, shared, tokens, groups, channels, seed, dtype):
    generator = torch.Generator().manual_seed(seed)
    plan = MergePlan(torch.randint(groups, (1 if shared else batch, tokens), generator=generator), groups)
    x, group = torch.randn(batch, tokens, channels, generator=generator).to(dtype), plan.group.expand(batch, -1)
    assert plan.sizes.tolist() == [row.bincount(minlength=groups).tolist() for row in plan.group]
    merged, expected = plan.merge(x), torch.zeros(batch, groups, channels, dtype=torch.float64)
    for sample, own in enumerate(group):
        for number in own.unique():
            expected[sample, number] = x[sample, own == number].double().mean(0)
        assert torch.equal(plan.unmerge(merged)[sample], merged[sample, own])
    assert merged.dtype == dtype
    assert (merged.double() - expected).abs().max() <= torch.finfo(dtype).eps * 4
    flat, (order, offsets) = x.float().flatten(0, 1), plan._flat_segments(batch)
    sorted_means = F.embedding_bag(order, flat, offsets, mode="mean", include_last_offset=True)  # CUDA's way
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(plans, "_WITHOUT_INDEX_ADD", ("cpu",))  # DirectML's
        for means in (sorted_means.view_as(merged), plan.merge(x.float())):
            assert torch.allclose(means, expected.float(), atol=1e-6)


def test_an_empty_group_has_mean_zero_size_zero_and_a_key_logit_that_hides_it():
    plan = MergePlan(torch.tensor([[0, 0, 2]]), 3)
    assert plan.sizes.tolist() == [[2, 0, 1]] and plan.empty.tolist() == [[False, True, False]]
    assert plan.merge(torch.ones(1, 3, 2))[0, 1].tolist() == [0.0, 0.0]
    assert plan.logits_in(torch.float32)[0, 1:].tolist() == [EMPTY_LOGIT, 0.0]


def test_merge_sums_half_precision_in_float32():
    x = torch.full((1, 4096, 64), 1000.0, dtype=torch.float16)  # the sum is beyond half precision, the mean is not
    plan = MergePlan(torch.zeros(1, 4096, dtype=torch.int64), 1)
    assert (plan.merge(x) == x[0, 0]).all()


def test_gradients_of_merge_and_unmerge_are_those_of_the_formula():
    plan = MergePlan(torch.tensor([[0, 1, 1, 0, 3], [2, 2, 2, 0, 1]]), 4)
    x, y = (torch.randn(2, count, 3, dtype=torch.float64, requires_grad=True) for count in (5, 4))
    assert torch.autograd.gradcheck(plan.merge, (x,))
    assert torch.autograd.gradcheck(plan.unmerge, (y,))


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


def test_equal_inputs_give_equal_bits_on_two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
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
