"""tomesd's way: a part of a block called with merged tokens, all parts of a rule by one match of the block's input."""

from __future__ import annotations

import pytest
import torch

import tome_core
from tests.models import BY_NAME, call_case
from tests.traces import is_idle
from tome_core import MergeConfig, MergeRule
from tome_core.hosting import state_of
from tome_core.merging.grid import Grid
from tome_core.merging.methods import METHODS

GRID = Grid(8, 8)
TOMESD = MergeConfig(ratio=0.5, merge_crossattn=True, merge_mlp=True, proportional=False, use_rand=False)
KEPT = MergeConfig(ratio=0.5, proportional=False, use_rand=False, keep=100.0)


@pytest.fixture(autouse=True)
def sampling_needs_no_gradients():
    with torch.no_grad():  # under which alone anything is kept
        yield


@pytest.fixture
def matches(monkeypatch) -> list:
    """Every plan of bipartite matching."""
    made, match = [], METHODS["bipartite"].match

    def note(x, grid, options):
        made.append(match(x, grid, options))
        return made[-1]

    monkeypatch.setitem(METHODS, "bipartite", METHODS["bipartite"]._replace(match=note))
    return made


def tokens(seed=0, batch=2):
    return torch.randn(batch, 64, 6, generator=torch.Generator().manual_seed(seed))


def doubled(x, merge):
    return merge(x) * 2


def around(state, x, function=doubled, timestep=500, part="attn", plans=None, call=None):
    """What the seam gives for one part, whose function is given its tokens and what merges them."""
    call = state.begin(timestep, x) if call is None else call
    plans = {} if plans is None else plans
    return state.around(call, "a", 0, part, GRID, x, lambda merge: function(x, merge), plans, keys=64)


@pytest.mark.parametrize("part", ["attn", "crossattn", "mlp"])
def test_a_part_runs_on_merged_tokens_and_gives_all_of_them(part, matches):
    state, x = state_of(TOMESD, 1), tokens()
    out = around(state, x, part=part)
    (plan,) = matches
    torch.testing.assert_close(out, plan.unmerge(plan.merge(x) * 2))
    assert state.report().levels[0].merged == {(part, 64, 32, {"attn": 32, "crossattn": 64, "mlp": 64}[part]): 1}


def test_parts_of_one_call_share_a_match(matches):
    state, x, plans = state_of(TOMESD, 1), tokens(), {}
    call = state.begin(500, x)
    for part in ("attn", "crossattn", "mlp"):
        around(state, x, part=part, plans=plans, call=call)
    assert len(matches) == 1


class Refused(Exception):
    pass


def refuses(x, merge):
    raise Refused


@pytest.mark.parametrize(("function", "why"), [
    (refuses, "refuses merged tokens"),
    (lambda x, merge: x, "what it returned cannot be unmerged"),
    (lambda x, merge: (merge(x),), "what it returned cannot be unmerged"),
])  # fmt: skip
def test_a_part_that_cannot_is_left_alone_and_said(function, why):
    state = state_of(TOMESD, 1)
    assert around(state, tokens(), function) is None
    assert list(state.report().reasons) == [f"attn: {why}"]


def test_want_of_memory_is_the_hosts_to_hear_of():
    def starves(x, merge):
        raise torch.cuda.OutOfMemoryError

    with pytest.raises(torch.cuda.OutOfMemoryError):
        around(state_of(TOMESD, 1), tokens(), starves)


def test_a_match_is_kept_over_steps_if_the_rule_says(matches):
    state = state_of(KEPT, 1)
    for timestep, made in ((900, 1), (800, 1), (799, 2)):
        state.set_time(timestep=timestep, sampling="a")
        around(state, tokens(), timestep=timestep)
        assert len(matches) == made


def test_calls_of_one_block_in_one_call_of_the_model_keep_apart(matches):
    state, pieces = state_of(KEPT, 1), [tokens(1), tokens(2)]
    for timestep in (900, 880):
        state.set_time(timestep=timestep, sampling="a")
        call = state.begin(timestep, torch.zeros(4, 4, 8, 8))
        found = [around(state, one, call=call) for one in pieces]
        for x, out, plan in zip(pieces, found, matches, strict=True):
            torch.testing.assert_close(out, plan.unmerge(plan.merge(x) * 2))


@pytest.mark.parametrize("name", ["ldm_sd1", "sd15", "sdxl", "sgm_double"])
@pytest.mark.parametrize("proportional", [False, True])
def test_a_block_matches_once_a_call_and_forgets(name, matches, proportional):
    """Proportional attention beside it has a match of its own, of its keys."""
    case = BY_NAME[name]
    model, alone = case.build(), case.build()
    config = MergeConfig(max_downsample=8, merge_crossattn=True, merge_mlp=True, proportional=proportional)
    with tome_core.patch(model, config) as handle:
        call_case(case, model, seed=1)
        levels = handle.report().levels
        blocks = sum(level.blocks for level in levels)
        assert len(matches) == (1 + proportional) * blocks
        assert sum(level.calls_merged for level in levels) == 3 * blocks
        second = call_case(case, model, seed=2)
        smaller = call_case(case, model, batch=1, height=24, seed=3)
        assert len(matches) == 3 * (1 + proportional) * blocks and is_idle(handle)
    for settings, picture in (({"seed": 2}, second), ({"batch": 1, "height": 24, "seed": 3}, smaller)):
        with tome_core.patch(alone, config):  # a call depends on no call before it
            assert torch.equal(call_case(case, alone, **settings), picture)


def test_parts_with_rules_of_their_own_match_apart(matches):
    case = BY_NAME["sd15"]
    keys, mlp = MergeRule(side="kv", ratio=0.75), MergeRule(merge_attn=False, merge_mlp=True)
    model = case.build()
    with tome_core.patch(model, MergeConfig(rules=(keys, mlp))) as handle:
        call_case(case, model)
    (level, *_) = handle.report().levels
    assert [plan.num_groups for plan in matches] == [64, 128] * level.blocks
    assert level.calls_merged == 2 * level.blocks
    assert (level.tokens, level.mlp_tokens) == (((256, 256, 64),), ((256, 128),))
