"""A match in windows: each window is matched and renewed by itself, and a larger picture has no larger windows."""

from dataclasses import replace

import pytest
import torch

from tests.small_models.sequences import attention
from tome_core import MergeConfig, MergeRule
from tome_core.engine.match import draw_of, match
from tome_core.hosting import state_of
from tome_core.merging import grid as layouts
from tome_core.merging.grid import Grid, Layout, tokens_in, windows
from tome_core.merging.methods import METHODS

RULE = MergeRule(side="kv", ratio=0.75, metric="keys+values", use_rand=False)
BANDS, FILM = Layout(Grid(20, 12), first=5), Layout(Grid(6 * 4, 12, frames=6), first=5)


@pytest.fixture(autouse=True)
def small_windows(monkeypatch):
    monkeypatch.setattr(layouts, "WINDOW", 8 * 12)


def assert_as_alone(plan, inputs, layout, rule, old=None):
    """Assert that each window's groups are its own match's, and each token around them a group. Return the matches."""
    before, parts = layout.first, []
    for number, (start, grid) in enumerate(windows(layout.grid)):
        tokens = slice(layout.first + start, layout.first + start + tokens_in(Layout(grid)))
        part = match(inputs.k[:, tokens], inputs.v[:, tokens], Layout(grid), rule, None, old and old[number])
        assert torch.equal(plan.group[:, tokens] - before, part.group.expand_as(plan.group[:, tokens]))
        before += part.num_groups
        parts.append(part)
    assert plan.num_groups == before + 3 and len(parts) > 2
    return parts


@pytest.mark.parametrize("layout", [BANDS, FILM], ids=["bands of rows", "runs of frames"])
@pytest.mark.parametrize("method", METHODS)
def test_each_window_merges_as_it_would_alone_and_is_renewed_from_its_own_plan(layout, method):
    """The same holds if the plan was made of one copy of the latents and serves several."""
    rule = replace(RULE, method=method)
    first, later = attention(layout, behind=3, batch=1, seed=1), attention(layout, behind=3, batch=2, seed=2)
    plan = match(first.k, first.v, layout, rule)
    parts = [part.repeat(2) for part in assert_as_alone(plan, first, layout, rule)]
    everywhere = plan.merge(first.k.flatten(2))
    for around in (slice(layout.first), slice(-3, None)):
        assert torch.equal(everywhere[:, around], first.k[:, around].flatten(2))
    renewed = match(later.k, later.v, layout, rule, None, plan.repeat(2))
    assert_as_alone(renewed, later, layout, rule, parts)
    assert not torch.equal(renewed.group, plan.group.expand_as(renewed.group))
    assert match(later.k, later.v, layout, rule, None, renewed).num_groups == plan.num_groups, "and once more"


def test_matches_of_a_call_share_a_draw_if_they_have_one_seed_level_and_device():
    state = state_of(MergeConfig(), 2)
    call, places = state.begin(500, None), [(0, 0, "cpu"), (1, 0, "cpu"), (0, 1, "cpu"), (0, 0, "meta")]

    def draw(call, level, seed, device):
        return draw_of(call, level, MergeRule(seed=seed), torch.device(device))

    for place in places:
        ours, alone = draw(call, *place), draw(state.begin(500, None), *place)
        assert ours is draw(call, *place) is not alone
        assert (ours.seed, ours.level, ours.time.device) == (alone.seed, alone.level, alone.time.device)
    assert len({id(draw(call, *place)) for place in places}) == len(places)
    assert draw_of(call, 0, MergeRule(use_rand=False), torch.device("cpu")) is None
