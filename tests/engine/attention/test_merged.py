"""Attention with merged keys and values: what its correction gains, and its bounds of work and memory."""

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.small_models.dits import distance
from tests.small_models.sequences import FILM, HEADS, PICTURE, WIDTH, attention, sdpa
from tests.watching.peak_memory import peak_bytes
from tome_core import MergePlan, MergeRule
from tome_core.attention import merged
from tome_core.attention.merged import Attention, MergeOptions, attend, correction_of
from tome_core.engine.match import match
from tome_core.merging.grid import Grid, Layout, tokens_in

RULE = MergeRule(side="kv", ratio=0.9375, sx=4, sy=4, metric="keys+values", use_rand=False, refine=1)


def match_of(call: Attention, layout: Layout) -> MergePlan:
    return match(call.k, call.v, layout, RULE)


def corrected(call: Attention, plan: MergePlan, layout: Layout) -> torch.Tensor:
    correction, pair = correction_of(call, plan, layout)
    return attend(call, MergeOptions(plan, correction=correction), pair)[0]


def by_head(call: Attention) -> Attention:
    """The same call with heads apart in memory, as torch's function gets them."""
    return call._replace(**{name: getattr(call, name).transpose(1, 2).contiguous().transpose(1, 2) for name in "qkv"})


@pytest.mark.parametrize("layout", [PICTURE, FILM])
def test_a_correction_halves_the_error_of_the_picture_and_harms_no_other_row(layout):
    call = attention(layout, behind=4)
    exact, plan = sdpa(*call[:3]), match_of(call, layout)
    plain, out = attend(call, MergeOptions(plan))[0], corrected(call, plan, layout)
    picture = torch.zeros(exact.shape[1], dtype=torch.bool)
    picture[layout.first : layout.first + tokens_in(layout)] = True
    assert distance(out[:, picture], exact[:, picture]) < 0.6 * distance(plain[:, picture], exact[:, picture])
    assert distance(out[:, ~picture], exact[:, ~picture]) < distance(plain[:, ~picture], exact[:, ~picture])


def test_exact_answers_are_asked_all_over_the_picture_and_of_others():
    """The first token after the picture is another query."""
    first, count = 49, 32 * 32
    tokens = first + count + 10
    (rows,) = merged.pick_queries_in(Layout(Grid(32, 32), first), tokens, WIDTH, torch.device("cpu"))
    assert len(set(rows.tolist())) == len(rows) and rows.max() < tokens
    inside = (rows >= first) & (rows < first + count)
    assert 32 <= inside.sum() <= 128 and (~inside).sum() == inside.sum() // 4
    assert (rows < first).any() and (rows == first + count).any()
    places = rows[inside] - first
    for axis in (places // 32, places % 32):
        assert axis.min() < 4 and axis.max() >= 28 and abs(axis.double().mean() - 15.5) <= 0.5


@pytest.mark.parametrize("layout, behind", [(PICTURE, 4), (FILM, 0)])
def test_in_pieces_and_however_heads_lie_it_gives_the_same(layout, behind, monkeypatch):
    call = attention(layout, behind)
    plan = match_of(call, layout)
    with torch.no_grad():
        expected = corrected(call, plan, layout), attend(call, MergeOptions(plan))[0]
        monkeypatch.setattr(merged, "_HELD", 1 << 14)
        monkeypatch.setattr(merged, "_AT_ONCE", 0)
        assert torch.equal(match_of(by_head(call), layout).group, plan.group)
        outputs = corrected(by_head(call), plan, layout), attend(by_head(call), MergeOptions(plan))[0]
    for out, whole in zip(outputs, expected, strict=True):
        torch.testing.assert_close(out, whole, rtol=1e-4, atol=1e-5)


def test_fewer_heads_of_keys_are_as_if_they_were_repeated():
    many = attention(PICTURE, takes_bias=False)
    few = many._replace(k=many.k[:, :, :1], v=many.v[:, :, :1])
    many = many._replace(**{name: getattr(few, name).expand(-1, -1, HEADS, -1) for name in "kv"})
    plan = match_of(few, PICTURE)
    assert correction_of(few, plan, PICTURE)[1] is None
    torch.testing.assert_close(corrected(few, plan, PICTURE), corrected(many, plan, PICTURE), rtol=1e-4, atol=1e-5)


def test_a_match_costs_less_than_a_twentieth_of_what_it_saves():
    """The film has 21 frames of 720p. Heads are narrow, because search and products grow alike with their width."""
    layout = Layout(Grid(21 * 45, 80, frames=21))
    tokens = tokens_in(layout)
    call = Attention(*torch.randn(3, 1, tokens, 1, 16, generator=torch.Generator().manual_seed(0)), sdpa, 0.25)
    with FlopCounterMode(display=False) as counted:
        plan = match(call.k, call.v, layout, replace(RULE, refine=3))
        correction_of(call, plan, layout)
    saved = 4 * tokens * (tokens - plan.num_groups) * 16
    assert 0.001 < counted.get_total_flops() / saved < 0.05


def test_it_holds_little_beyond_attentions_own_memory(monkeypatch):
    """It holds merged keys and values, a sixteenth of all, and pieces whose size does not grow."""
    layout, piece = Layout(Grid(24 * 16, 20, frames=24), first=20), 1 << 16
    monkeypatch.setattr(merged, "_HELD", piece)
    monkeypatch.setattr(merged, "_AT_ONCE", 0)
    call = by_head(attention(layout, batch=1))
    plan, tensor, scores = match_of(call, layout), call.k.numel() * 4, 8 << 20
    with torch.inference_mode():
        sdpa(*call[:3]), corrected(call, match_of(call, layout), layout)
        plain = peak_bytes(lambda: sdpa(*call[:3]))
        matching = peak_bytes(lambda: match_of(call, layout))
        attending = peak_bytes(lambda: corrected(call, plan, layout))
    maps = 8 * 8 * call.k.shape[1]  # integers for each token: groups and orders
    assert matching <= scores + 2 * tensor + maps
    assert attending <= plain + 2 * tensor / 8 + 12 * piece
    assert plain > tensor / 2, "the count sees what is held"
