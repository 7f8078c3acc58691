"""Proportional attention: exact, in every family, by whichever way an attention takes."""

from __future__ import annotations

import pytest
import torch
from diffusers.models.attention_processor import Attention
from tests.sized_attention import everywhere, masked_formula, sides
from tome_core.attention.core import BIAS, UNSIZED, WIDER_HEADS, Attended, attend_merged

import tome_core
from tests.families import every_family_in_time, largest_difference
from tests.models import BY_NAME, ModelCase, call_case
from tome_core import MergePlan
from tome_core.attention import known_of


@every_family_in_time
@sides
@pytest.mark.parametrize("wide", [True, False])
def test_every_family_gives_the_masked_formula(case: ModelCase, side: str, wide: bool, attended, request):
    """LDM's masks choose keys, and those that are known by their ``forward`` alone are asked for none."""
    way = WIDER_HEADS if wide or case.name.startswith(("ldm", "sgm", "comfy")) else BIAS
    if wide:
        request.getfixturevalue("wide_heads")
    model = case.build()
    with tome_core.patch(model, everywhere(side)) as handle:
        call_case(case, model)
    levels = handle.report().levels
    assert all(level.routes.keys() == {way} for level in levels)
    assert len(attended) == sum(sum(level.routes.values()) for level in levels) >= len(levels)
    for attention, plan, _, x, keys, out in attended:
        with torch.no_grad():
            expected = masked_formula(attention, x, keys, plan.sizes)
            unsized = masked_formula(attention, x, keys, torch.ones_like(plan.sizes))
        assert largest_difference(out, expected) <= 1e-5 * max(1.0, expected.abs().max().item())
        assert largest_difference(unsized, expected) > 1e-3


def test_tomesds_arguments_leave_the_sizes_out(attended):
    """As tomesd does: one call of the attention, whatever it is, on merged tokens, and not a word of sizes."""
    case = BY_NAME["sd15"]
    model = tome_core.apply_patch(case.build())
    call_case(case, model)
    (level, *_) = tome_core.report(model).levels
    assert not attended and level.calls_merged == level.blocks and not level.routes


def test_without_proportional_attention_no_key_weighs_more(attended):
    case = BY_NAME["sd15"]
    with tome_core.patch(case.build(), everywhere("kv", proportional=False)) as handle:
        call_case(case, handle.unet)
    assert {call.way for call in attended} == {UNSIZED} and not handle.report().levels[0].routes
    for attention, _, _, x, keys, out in attended:
        with torch.no_grad():
            expected = masked_formula(attention, x, keys, torch.ones(1, keys.shape[1]))
        assert largest_difference(out, expected) <= 1e-5 * max(1.0, expected.abs().max().item())


# --- half precision ---------------------------------------------------------------------------------------------------


def _attended(attention, x, keys, plan) -> Attended:
    """In whichever way is in force."""
    return attend_merged(known_of(attention), attention, x, keys, keys, plan, {})


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [40, 64, 80, 160])
def test_wider_heads_are_no_worse_than_a_bias_in_half_precision(dtype, width, capsys, request):
    torch.manual_seed(width)
    attention = Attention(2 * width, heads=2, dim_head=width).requires_grad_(False).to(dtype)
    x, keys = torch.randn(2, 512, 2 * width).to(dtype), torch.randn(2, 128, 2 * width).to(dtype)
    plan = MergePlan((torch.rand(1, 4096) ** 3 * 128).long(), 128)
    expected = masked_formula(attention, x, keys, plan.sizes)
    biased = _attended(attention, x, keys, plan)
    request.getfixturevalue("wide_heads")
    wide = _attended(attention, x, keys, plan)
    assert (biased.way, wide.way) == (BIAS, WIDER_HEADS)
    by_bias, by_width = (((one.out - expected).norm() / expected.norm()).item() for one in (biased, wide))
    with capsys.disabled():
        print(f"\n  {dtype}, width {width}: wider heads {by_width:.1e}, bias {by_bias:.1e} ", end="")
    # both round alike, and which is closer is chance; a CPU's kernels of torch 2.4 differ by one rounding of float16
    assert by_width <= max(1.1 * by_bias, 1.5 * torch.finfo(torch.float16).eps)
