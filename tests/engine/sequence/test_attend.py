"""Merging in a sequence: the picture's tokens alone, text comes out untouched, at bounded work and memory."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.peak_memory import peak_bytes
from tests.sequences import FILM, HEADS, PICTURE, WIDTH, host, sdpa, tensors
from tome_core import MergeRule
from tome_core.attention.core import BIAS
from tome_core.merging.grid import Grid, cells
from tome_core.sequence import BY_HEAD, BY_TOKEN, FLAT, Layout
from tome_core.sequence import attend as attending
from tome_core.sequence.attend import OWN_BIAS, attend, correction_of, merge
from tome_core.sequence.layout import WINDOW, Tensors, by_token, in_form, tokens_in, windows
from tome_core.engine.match import match

RULE = MergeRule(side="kv", ratio=0.9375, sx=4, sy=4, metric="keys+values", use_rand=False, refine=1)


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return ((found - exact).pow(2).mean() / exact.pow(2).mean()).sqrt().item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout, behind", [(PICTURE, 0), (PICTURE, 5), (FILM, 3)])
def test_other_tokens_keep_their_keys_and_values(layout, behind, dtype):
    _, k, v = tensors(layout, behind, dtype=dtype)
    plan = match(k, v, layout, RULE)
    last, groups = layout.first + tokens_in(layout), plan.num_groups
    assert groups < k.shape[1] / 8 and (plan.sizes[:, : layout.first] == 1).all()
    for one in (k, v):
        few = merge(one, plan)
        assert torch.equal(few[:, : layout.first], one[:, : layout.first])
        assert torch.equal(few[:, groups - behind :], one[:, last:])


@pytest.mark.parametrize("layout", [PICTURE, FILM])
def test_attention_is_that_with_every_key_as_often_as_its_group_has_tokens(layout):
    own = tensors(layout, behind=2, dtype=torch.float64)
    plan = match(own.k.float(), own.v.float(), layout, RULE)
    found = attend(host(), own, plan)
    repeated = (plan.unmerge(merge(one, plan).flatten(2)).unflatten(2, (HEADS, WIDTH)) for one in (own.k, own.v))
    logits = torch.einsum("bqhd,bkhd->bhqk", own.q, next(repeated)) * WIDTH**-0.5
    exact = torch.einsum("bhqk,bkhd->bqhd", logits.softmax(-1), next(repeated))
    assert found.way == BIAS
    torch.testing.assert_close(found.out, exact, rtol=1e-7, atol=1e-7)  # sizes' logarithms are float32


@pytest.mark.parametrize("takes_bias", [True, False])
@pytest.mark.parametrize("layout", [PICTURE, FILM])
def test_a_correction_halves_the_error_of_the_picture_and_harms_no_other_row(layout, takes_bias):
    own = tensors(layout, behind=4)
    exact, plan = sdpa(*own), match(own.k, own.v, layout, RULE)
    plain, way = attend(host(takes_bias=takes_bias), own, plan)
    correction, made = correction_of(own, plan, layout, WIDTH**-0.5)
    found = attend(host(takes_bias=takes_bias), own, plan, True, correction, made).out
    unsized = attend(host(), own, plan, proportional=False).out
    assert way == (BIAS if takes_bias else OWN_BIAS)
    picture = torch.zeros(exact.shape[1], dtype=torch.bool)
    picture[layout.first : layout.first + tokens_in(layout)] = True
    assert error(found[:, picture], exact[:, picture]) < 0.6 * error(plain[:, picture], exact[:, picture])
    assert error(plain, exact) < 0.6 * error(unsized, exact)
    assert error(found[:, ~picture], exact[:, ~picture]) < error(plain[:, ~picture], exact[:, ~picture])


def test_exact_answers_are_asked_of_the_picture_and_of_others():
    layout, tokens = Layout(Grid(32, 32), first=50), 50 + 1024 + 9
    (rows,) = attending.pick_asked_in(layout, tokens, WIDTH, torch.device("cpu"))
    assert len(set(rows.tolist())) == len(rows) and rows.max() < tokens
    inside = (rows >= 50) & (rows < 50 + 1024)
    assert 32 <= inside.sum() <= 128 and (~inside).sum() == inside.sum() // 4
    assert (rows < 50).any() and (rows >= 50 + 1024).any()


@pytest.mark.parametrize("form", [FLAT, BY_HEAD, BY_TOKEN])
@pytest.mark.parametrize("out_form", [FLAT, BY_HEAD])
def test_every_form_gives_the_same(form, out_form, monkeypatch):
    own = tensors(PICTURE)
    given = Tensors(*(by_token(in_form(one, form).contiguous(), form, HEADS) for one in own))
    plan = match(given.k, given.v, PICTURE, RULE)
    assert torch.equal(plan.group, match(own.k, own.v, PICTURE, RULE).group)
    expected = attend(host(), own, plan, True, *correction_of(own, plan, PICTURE, WIDTH**-0.5)).out
    monkeypatch.setattr(attending, "_HELD", 1 << 14)  # in pieces
    found = attend(host(form, out_form), given, plan, True, *correction_of(given, plan, PICTURE, WIDTH**-0.5))
    torch.testing.assert_close(by_token(found.out, out_form, HEADS), expected, rtol=1e-4, atol=1e-5)


def test_fewer_heads_of_keys_are_as_if_they_were_repeated():
    q, k, v = tensors(PICTURE)
    few = Tensors(q, k[:, :, :1], v[:, :, :1])
    plan = match(few.k, few.v, PICTURE, RULE)
    correction, made = correction_of(few, plan, PICTURE, WIDTH**-0.5)
    many = Tensors(q, *(one.expand(-1, -1, HEADS, -1) for one in few[1:]))
    found = attend(host(takes_bias=False), few, plan, True, correction, made).out
    expected = attend(host(), many, plan, True, *correction_of(many, plan, PICTURE, WIDTH**-0.5)).out
    assert made is None
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_samples_match_by_themselves_and_equal_inputs_alike():
    _, k, v = tensors(PICTURE, batch=3)
    group = match(k, v, PICTURE, RULE).group
    assert torch.equal(group, match(k.clone(), v.clone(), PICTURE, RULE).group)
    for sample in range(3):
        assert torch.equal(group[sample], match(k[sample, None], v[sample, None], PICTURE, RULE).group[0])
    assert not torch.equal(group[0], group[1])


@pytest.mark.parametrize("grid", [
    Grid(64, 64), Grid(256, 256), Grid(67, 131), Grid(21 * 45, 80, 21), Grid(13 * 30, 52, 13), Grid(5 * 90, 160, 5),
    Grid(3, 5), Grid(3 * 128, 128, 3),
])  # fmt: skip
def test_windows_cover_the_grid_once(grid):
    frame, end = grid.height // grid.frames * grid.width, 0
    for start, one in windows(grid):
        assert start == end and one.width == grid.width and one.height * one.width <= WINDOW
        whole = one.height * one.width % frame == 0 and one.frames == one.height * one.width // frame
        assert whole or one.frames == 1
        end += one.height * one.width
    assert end == grid.height * grid.width


def test_a_films_cells_hold_tokens_that_are_near_in_time_too():
    grid, device = Grid(4 * 6, 8, frames=4), torch.device("cpu")
    members, rest = cells(grid, 2, 4, device, st=2)
    assert members.shape == (4 * 6 * 8 // 16, 16) and not len(rest)
    assert sorted(members.flatten().tolist()) == list(range(4 * 6 * 8))
    frame, row, column = members // 48, members % 48 // 8, members % 8
    for place, side in ((frame, 2), (row, 2), (column, 4)):
        assert (place.amax(1) - place.amin(1) == side - 1).all()


def test_a_match_costs_less_than_a_twentieth_of_what_it_saves():
    """Of attention over 21 frames at 720p: products are counted, the attention's by its formula. Heads are narrow, and
    what is searched and multiplied grows with them alike."""
    layout = Layout(Grid(21 * 45, 80, frames=21))
    own = Tensors(*torch.randn(3, 1, tokens_in(layout), 1, 16, generator=torch.Generator().manual_seed(0)))
    rule = MergeRule(side="kv", ratio=0.9375, sx=4, sy=4, metric="keys+values", use_rand=False, refine=3)
    with FlopCounterMode(display=False) as counted:
        plan = match(own.k, own.v, layout, rule)
        correction_of(own, plan, layout, 0.25)
    tokens = tokens_in(layout)
    saved = 4 * tokens * (tokens - plan.num_groups) * 16
    assert 0.001 < counted.get_total_flops() / saved < 0.05


@pytest.mark.parametrize("form", [FLAT, BY_HEAD])
def test_it_holds_little_beyond_what_attention_holds(form, monkeypatch):
    """Merged keys and values, which are a sixteenth, and some pieces of a size that does not grow."""
    layout, piece = Layout(Grid(24 * 16, 20, frames=24), first=20), 1 << 18
    monkeypatch.setattr(attending, "_HELD", piece)
    own = tensors(layout, batch=1)
    own = Tensors(*(by_token(in_form(one, form).contiguous(), form, HEADS) for one in own))
    given = host(form, form)
    tensor, scores = own.k.numel() * 4, 8 << 20

    def plainly():
        return given.function(*(in_form(one, form) for one in own), None)

    def merging():
        plan = match(own.k, own.v, layout, RULE)
        return attend(given, own, plan, True, *correction_of(own, plan, layout, WIDTH**-0.5)).out

    with torch.inference_mode():
        plainly(), merging()
        plain, peak = peak_bytes(plainly), peak_bytes(merging)
    maps = 8 * 8 * own.k.shape[1]  # whole numbers for each token: groups and orders
    assert peak <= max(plain + 2 * tensor / 8, scores) + 12 * piece + maps, (peak, plain, tensor)
    assert math.isclose(plain, tensor, rel_tol=0.5)
