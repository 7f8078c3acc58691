"""Merged keys that know how many tokens they stand for: exact, in every family, by whichever way an attention takes."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from diffusers.models.attention_processor import Attention

import tome_core
from tests.models import CASES, Case, call_case
from tests.sized_attention import attended, everywhere, masked_formula, sides, wide_heads  # noqa: F401
from tests.test_patch_contract import every_family, largest_difference, traces
from tome_core import MergePlan, MergeRule
from tome_core.fold import ProjectionWraps, extra_channels
from tome_core.probe import FOLDED, MASK, Route, folding_of, key_mask

BY_NAME = {case.name: case for case in CASES}


@every_family
@sides
@pytest.mark.parametrize("wide", [True, False])
def test_every_family_gives_the_masked_formula(case: Case, side: str, wide: bool, attended, request):  # noqa: F811
    """LDM's masks choose keys, and sgm's have no samples: neither is added to the logits."""
    way = FOLDED if wide or case.name.startswith(("ldm", "sgm")) else MASK
    if wide:
        request.getfixturevalue("wide_heads")
    model = case.build()
    with tome_core.patch(model, everywhere(side)) as handle:
        call_case(case, model)
    levels = handle.report().levels
    assert all(level.routes.keys() == {way} for level in levels)
    calls = [call for call in attended if call[2].kind == way]  # the others' keys are not the picture's tokens
    assert len(calls) == sum(sum(level.routes.values()) for level in levels) >= len(levels)
    for attention, plan, _, x, keys, out in calls:
        with torch.no_grad():
            expected = masked_formula(attention, x, keys, plan.sizes)
            unsized = masked_formula(attention, x, keys, torch.ones_like(plan.sizes))
        assert largest_difference(out, expected) <= 1e-5 * max(1.0, expected.abs().max().item())
        assert largest_difference(unsized, expected) > 1e-3


@every_family
@sides
def test_patched_twice_copied_pickled_and_removed(case: Case, side: str):
    model = case.build()
    before, vanilla = traces(model), call_case(case, model)
    with tome_core.patch(model, everywhere(side, ratio=0.7)):
        sized = call_case(case, model)
        with tome_core.patch(model, everywhere(side, ratio=0.3)):
            call_case(case, model)
        assert torch.equal(call_case(case, model), sized)
        assert model.state_dict().keys() == case.build().state_dict().keys()
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(call_case(case, other), sized)
            for parameter in other.parameters():
                parameter.data.mul_(1.5)
            assert largest_difference(call_case(case, other), sized) > 1e-3
            tome_core.remove_patch(other)
            assert traces(other) == before
        assert torch.equal(call_case(case, model), sized)
        with tome_core.patch(model, everywhere(side, ratio=0.7, proportional=False)):
            assert largest_difference(call_case(case, model), sized) > 1e-4
    assert traces(model) == before and torch.equal(call_case(case, model), vanilla)


def test_tomesds_arguments_leave_the_sizes_out(attended):  # noqa: F811
    case = BY_NAME["sd15"]
    call_case(case, tome_core.apply_patch(case.build()))
    assert attended and all(route.kind == "without" and not route.why for _, _, route, _, _, _ in attended)


def test_down_sampling_and_merged_queries_have_nothing_to_tell_keys():
    assert not MergeRule(method="downsample").sizes_keys and not MergeRule(side="q").sizes_keys
    assert MergeRule().sizes_keys and not MergeRule(proportional=False).sizes_keys


# --- half precision, and groups without tokens ------------------------------------------------------------------


def _folded(attention, x, keys, plan) -> torch.Tensor:
    wraps, width = ProjectionWraps(attention), attention.to_q.out_features // attention.heads
    wraps.install()
    extra = extra_channels(width)
    wraps.now.call = folding_of(
        Route(FOLDED, "", width**-0.5, (width + extra) ** -0.5, attention.heads, extra), plan
    )
    try:
        return attention(x, encoder_hidden_states=keys)
    finally:
        wraps.now.call = None
        wraps.uninstall()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [40, 64, 80, 160])
def test_half_precision_is_no_worse_than_a_mask(dtype, width, capsys):
    torch.manual_seed(width)
    attention = Attention(2 * width, heads=2, dim_head=width).requires_grad_(False).to(dtype)
    x, keys = torch.randn(2, 512, 2 * width).to(dtype), torch.randn(2, 128, 2 * width).to(dtype)
    plan = MergePlan((torch.rand(1, 4096) ** 3 * 128).long(), 128)
    expected = masked_formula(attention, x, keys, plan.sizes)
    folded, masked = (
        ((out - expected).norm() / expected.norm()).item()
        for out in (
            _folded(attention, x, keys, plan),
            attention(x, encoder_hidden_states=keys, attention_mask=key_mask(plan, x)),
        )
    )
    with capsys.disabled():
        print(f"\n  {dtype}, width {width}: folded {folded:.1e}, mask {masked:.1e} ", end="")
    # both round alike, and which is closer is chance; a CPU's kernels of torch 2.4 differ by one rounding of float16
    assert folded <= max(1.1 * masked, 1.5 * torch.finfo(torch.float16).eps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_group_without_tokens_weighs_nothing(dtype):
    torch.manual_seed(0)
    attention = Attention(64, heads=4, dim_head=16).requires_grad_(False).to(dtype)
    x, keys = torch.randn(1, 9, 64).to(dtype), torch.randn(1, 5, 64).to(dtype)
    plan = MergePlan(torch.tensor([[0, 0, 2, 2, 2, 4, 4, 4, 4]]), 5)
    out = _folded(attention, x, keys, plan)
    other = keys.clone()
    other[:, [1, 3]] = 30.0
    assert out.isfinite().all() and torch.equal(out, _folded(attention, x, other, plan))
