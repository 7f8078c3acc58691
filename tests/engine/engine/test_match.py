"""A match in windows: each window by itself, made anew and renewed, and none larger because the picture is."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.sequences import attention
from tome_core import MergeRule
from tome_core.engine.match import match
from tome_core.merging import grid as layouts
from tome_core.merging.grid import Grid, Layout, tokens_in, windows
from tome_core.merging.methods import METHODS

RULE = MergeRule(side="kv", ratio=0.75, metric="keys+values", use_rand=False)
BANDS, FILM = Layout(Grid(20, 12), first=5), Layout(Grid(6 * 4, 12, frames=6), first=5)
in_windows = pytest.mark.parametrize("layout", [BANDS, FILM], ids=["bands of rows", "runs of frames"])


@pytest.fixture(autouse=True)
def small_windows(monkeypatch):
    monkeypatch.setattr(layouts, "WINDOW", 8 * 12)


def alone(own, layout, rule, old=None):
    """What each window's own match gives: its tokens in the sequence, and its plan."""
    found = []
    for number, (start, grid) in enumerate(windows(layout.grid)):
        first = layout.first + start
        tokens = slice(first, first + tokens_in(Layout(grid)))
        before = None if old is None else old[number][1]
        found.append((tokens, match(own.k[:, tokens], own.v[:, tokens], Layout(grid), rule, None, before)))
    return found


@in_windows
@pytest.mark.parametrize("method", METHODS)
def test_each_window_merges_as_it_would_alone(layout, method):
    rule, own = replace(RULE, method=method), attention(layout, behind=3)
    plan, parts = match(own.k, own.v, layout, rule), alone(own, layout, rule)
    assert len(parts) > 2
    before = layout.first
    for tokens, part in parts:
        assert torch.equal(plan.group[:, tokens] - before, part.group.expand_as(plan.group[:, tokens]))
        before += part.num_groups
    assert plan.num_groups == before + 3, "and each of the tokens around them is a group"
    everywhere = plan.merge(own.k.flatten(2))
    assert torch.equal(everywhere[:, : layout.first], own.k[:, : layout.first].flatten(2))
    assert torch.equal(everywhere[:, -3:], own.k[:, -3:].flatten(2))


@in_windows
def test_each_window_is_renewed_from_its_own_plan(layout):
    """Also if the plan was made of one copy of the latents, and serves several."""
    first, later = attention(layout, behind=3, batch=1, seed=1), attention(layout, behind=3, batch=2, seed=2)
    plan = match(first.k, first.v, layout, RULE).repeat(2)
    parts = [(tokens, part.repeat(2)) for tokens, part in alone(first, layout, RULE)]
    found = match(later.k, later.v, layout, RULE, None, plan)
    before = layout.first
    for tokens, part in alone(later, layout, RULE, parts):
        assert torch.equal(found.group[:, tokens] - before, part.group)
        before += part.num_groups
    assert found.num_groups == plan.num_groups and not torch.equal(found.group, plan.group.expand_as(found.group))
    again = match(later.k, later.v, layout, RULE, None, found)
    assert again.num_groups == plan.num_groups, "and renewed once more"


def test_a_films_cells_reach_over_its_frames(monkeypatch):
    """Of two frames, two rows and four columns, if a rule's are of four by four."""
    own, seen, plain = attention(FILM), [], METHODS["bipartite"].match
    note = METHODS["bipartite"]._replace(match=lambda x, *args: seen.append(args) or plain(x, *args))
    monkeypatch.setitem(METHODS, "bipartite", note)
    plan = match(own.k, own.v, FILM, replace(RULE, sx=4, sy=4, ratio=15 / 16))
    ((grid, options),) = seen  # windows of two frames, all at once
    assert grid.frames == 2 and (options.st, options.sy, options.sx) == (2, 2, 4)
    assert plan.num_groups - (plan.group.shape[1] - tokens_in(FILM)) == tokens_in(FILM) // 16


def test_a_rule_that_removes_no_token_of_a_window_merges_nothing():
    own = attention(BANDS)
    assert match(own.k, own.v, BANDS, replace(RULE, ratio=0.01)) is None
