"""Laws of the merge plan, over odd shapes, dtypes and group counts."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from tome_core import MergePlan
from tome_core.merging import plan as plans
from tome_core.merging.plan import _segments

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
    for sample, numbers in enumerate(group):
        for number in numbers.unique():
            expected[sample, number] = x[sample, numbers == number].double().mean(0)
        assert torch.equal(plan.unmerge(merged)[sample], merged[sample, numbers])
    assert merged.dtype == dtype
    assert (merged.double() - expected).abs().max() <= torch.finfo(dtype).eps * 4
    flat, (order, offsets) = x.float().flatten(0, 1), plan._flat_segments(batch)
    sorted_means = F.embedding_bag(order, flat, offsets, mode="mean", include_last_offset=True)  # CUDA's way
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(plans, "_WITHOUT_INDEX_ADD", ("cpu",))  # DirectML's
        for means in (sorted_means.view_as(merged), plan.merge(x.float())):
            assert torch.allclose(means, expected.float(), atol=1e-6)


def test_merge_sums_half_precision_in_float32():
    x = torch.full((1, 4096, 64), 1000.0, dtype=torch.float16)  # the sum is beyond half precision, the mean is not
    plan = MergePlan(torch.zeros(1, 4096, dtype=torch.int64), 1)
    assert (plan.merge(x) == x[0, 0]).all()


@pytest.mark.parametrize("groups", [2**14 - 1, 2**14, 2**14 + 1])
def test_segments_of_as_many_groups_as_a_short_number_holds(groups):
    """Two rows of segments are tested: the last that fit 16 bits, and the first that do not."""
    group = torch.stack([torch.arange(groups).flip(0), torch.arange(groups)])
    order, offsets = _segments(group, groups)
    assert torch.equal(offsets, torch.arange(2 * groups + 1))
    assert torch.equal(order, torch.cat([torch.arange(groups).flip(0), groups + torch.arange(groups)]))


def test_equal_inputs_give_equal_bits_on_two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        group, x = torch.randint(700, (2, 4096)), torch.randn(2, 4096, 320)
        first = MergePlan(group, 700).merge(x)
        assert all(torch.equal(MergePlan(group, 700).merge(x), first) for _ in range(5))
    finally:
        torch.set_num_threads(before)
