"""The seam: what an adapter gives of a call, what it gets back, and what is counted and said of it."""

from __future__ import annotations

import math

import pytest
import torch

from tests.models import merge_with_self
from tests.sequences import FILM, PICTURE, attention, sdpa
from tome_core import MergeConfig, MergeRule, strength
from tome_core.attention.merged import pick_asked_in
from tome_core.hosting import state_of
from tome_core.merging.grid import Grid, Layout, tokens_in
from tome_core.merging.methods import METHODS

STRONG = MergeConfig(side="kv", ratio=0.9375, sx=4, sy=4, metric="keys+values", use_rand=False, refine=1)
TOMESD = MergeConfig(ratio=0.5, merge_crossattn=True, merge_mlp=True, proportional=False, use_rand=False, keep=100.0)
GRID = Grid(8, 8)


def attend(config, own, layout=PICTURE, timestep=500, **facts):
    """The output of one attention in one call, and what is reported."""
    state = state_of(config, 2, **facts)
    call = state.begin(timestep, own.q[:, layout.first :, :1, :1].transpose(1, 3))
    return state.attend(call, "a", 0, layout, own), state.report()


def test_off_leaves_every_call_to_its_host():
    for config in (strength(0), MergeConfig(ratio=0.0), MergeConfig(side="kv", end_percent=0.0)):
        out, report = attend(config, attention(PICTURE))
        assert out is None and not report.merged_anything and report.work_saved == 0 and report.reasons


@pytest.mark.parametrize("layout", [PICTURE, FILM])
def test_what_it_gives_is_near_and_counted(layout):
    own = attention(layout, behind=2)
    out, report = attend(STRONG, own, layout, blocks=3)
    exact = sdpa(*own[:3])
    assert 0 < (out - exact).norm() < 0.2 * exact.norm()
    (level,) = report.levels
    assert (level.downsample, level.blocks) == (2, 3)
    ((before, queries, keys),) = level.tokens
    assert before == queries == own.q.shape[1] and keys < before / 8
    (asked,) = pick_asked_in(layout, before, own.q.shape[3], torch.device("cpu"))  # answered from all keys
    assert level.work_saved == pytest.approx(1 - (keys + len(asked)) / before)


def test_queries_merge_too_where_the_side_is_theirs():
    own = attention(PICTURE, behind=2)
    out, report = attend(MergeConfig(ratio=0.5, metric="keys+values", use_rand=False), own)
    exact = sdpa(*own[:3])
    assert out.shape == exact.shape and 0 < (out - exact).norm() < 0.3 * exact.norm()
    torch.testing.assert_close(out[:, :7], exact[:, :7], rtol=0.2, atol=0.1)  # text, by itself
    ((_, queries, keys),) = report.levels[0].tokens
    assert queries == keys == own.q.shape[1] - tokens_in(PICTURE) // 2


def test_where_every_token_is_a_group_of_its_own_it_gives_what_its_host_gives(monkeypatch):
    merge_with_self(monkeypatch)
    own = attention(FILM, behind=3)
    for side in ("kv", "qkv"):
        out, report = attend(MergeConfig(side=side, ratio=0.5, use_rand=False, correction=False), own, FILM)
        assert report.merged_anything
        torch.testing.assert_close(out, sdpa(*own[:3]))


def test_what_does_not_fit_is_left_alone_and_said():
    gentle, own = MergeConfig(side="kv", ratio=0.25, use_rand=False), attention(PICTURE, behind=4)
    fewer_keys = own._replace(k=own.k[:, :-4], v=own.v[:, :-4])
    other_parts = MergeConfig(rules=(MergeRule(merge_attn=False, merge_mlp=True),))
    for config, layout, given, why in (
        (gentle, Layout(PICTURE.grid, 1000), own, "attn: the tokens are not the picture's grid"),
        (gentle, Layout(Grid(1, 2)), own, "attn: the grid is too small"),
        (STRONG, PICTURE, fewer_keys, "attn: the tokens are not the picture's grid"),
        (other_parts, PICTURE, own, "attn: its rule merges other parts"),
    ):
        out, report = attend(config, given, layout)
        assert out is None and [reason[: len(why)] for reason in report.reasons] == [why]


def test_the_way_of_sizes_is_reported():
    for takes_bias, proportional, ways in (
        (True, True, {"bias": 1}), (False, True, {"bias, by torch's own function": 1}), (True, False, {}),
    ):  # fmt: skip
        config = MergeConfig(side="kv", ratio=0.5, proportional=proportional, use_rand=False)
        out, report = attend(config, attention(PICTURE, takes_bias=takes_bias))
        assert out is not None and report.levels[0].sized_by == ways


def test_samples_differ_in_their_draws_if_they_differ_in_time_and_a_number_is_a_tensor():
    own = attention(PICTURE, batch=1)
    twice = own._replace(**{name: getattr(own, name).repeat(2, 1, 1, 1) for name in "qkv"})
    config = MergeConfig(side="kv", ratio=0.5, correction=False)
    same, _ = attend(config, twice, timestep=torch.tensor([500, 500]))
    assert torch.equal(same[0], same[1]) and torch.equal(same, attend(config, twice, timestep=500)[0])
    apart, _ = attend(config, twice, timestep=torch.tensor([500, 400]))
    assert torch.equal(apart[0], same[0]) and not torch.equal(apart[0], apart[1])
    frames = twice._replace(**{name: getattr(twice, name).repeat(2, 1, 1, 1) for name in "qkv"})
    film, _ = attend(config, frames, timestep=torch.tensor([500, 400]))
    assert torch.equal(film, apart.repeat_interleave(2, 0)), "a picture's frames have its time"


@pytest.mark.parametrize("method", METHODS)
def test_gradients_reach_queries_keys_and_values(method):
    own = attention(PICTURE, batch=1)
    own = own._replace(**{name: getattr(own, name).requires_grad_() for name in "qkv"})
    out, _ = attend(MergeConfig(side="kv", ratio=0.5, method=method), own)
    out.sum().backward()
    assert all(tensor.grad.abs().sum() > 0 for tensor in own[:3])


def test_maps_are_of_the_picture_alone_and_of_a_film_its_first_frame_if_they_are_asked_for():
    state, own = state_of(STRONG, 2), attention(FILM, behind=3)
    for keeps in (False, True, True):
        state.reset_counts()
        assert not state.maps() and not state.report().calls
        state.attend(state.begin(500, own.q), "a", 0, FILM, own)
        assert [(*found.grid[:2], *found.group.shape) for found in state.maps().values()] == [(8, 12, 2, 96)] * keeps
        if not keeps:
            state.keep_maps()


# --- tomesd's way: parts of a block, called with merged tokens -------------------------------------------------------


@pytest.fixture
def matches(monkeypatch) -> list:
    """Every plan of bipartite matching."""
    plans, match = [], METHODS["bipartite"].match
    note = METHODS["bipartite"]._replace(match=lambda *given: plans.append(match(*given)) or plans[-1])
    monkeypatch.setitem(METHODS, "bipartite", note)
    return plans


def tokens(seed=0):
    return torch.randn(2, 64, 6, generator=torch.Generator().manual_seed(seed))


def around(state, x, call, part="attn", function=lambda x, merge: merge(x) * 2, plans=None):
    """What the seam gives for one part, whose function is given its tokens and what merges them."""
    plans = {} if plans is None else plans
    return state.around(call, "a", 0, part, GRID, x, lambda merge: function(x, merge), plans, keys=64)


def test_the_parts_of_a_call_run_on_merged_tokens_of_one_match_and_give_all_of_them(matches):
    state, x, plans = state_of(TOMESD, 1), tokens(), {}
    call = state.begin(500, x)
    for part in ("attn", "crossattn", "mlp"):
        out = around(state, x, call, part, plans=plans)
        (plan,) = matches
        torch.testing.assert_close(out, plan.unmerge(plan.merge(x) * 2))
    assert state.report().levels[0].merged == {("attn", 64, 32, 32): 1, ("crossattn", 64, 32, 64): 1,
                                               ("mlp", 64, 32, 64): 1}  # fmt: skip


def refuses(x, merge):
    raise KeyError


def starves(x, merge):
    raise torch.cuda.OutOfMemoryError


def test_a_part_that_cannot_is_left_alone_and_said_and_want_of_memory_is_the_hosts_to_hear_of():
    x = tokens()
    for function, why in (
        (refuses, "refuses merged tokens"), (lambda x, merge: x, "what it returned cannot be unmerged"),
        (lambda x, merge: (merge(x),), "what it returned cannot be unmerged"),
    ):  # fmt: skip
        state = state_of(TOMESD, 1)
        assert around(state, x, state.begin(500, x), function=function) is None
        assert list(state.report().reasons) == [f"attn: {why}"]
    with pytest.raises(torch.cuda.OutOfMemoryError):
        around(state, x, state.begin(500, x), function=starves)


@torch.no_grad()
def test_matches_of_a_blocks_input_are_kept_over_steps_and_those_of_its_pieces_apart(matches):
    state, pieces = state_of(TOMESD, 1), [tokens(1), tokens(2)]
    for timestep, count in ((900, 2), (800, 2), (799, 4)):
        state.set_time(timestep=timestep, sampling="a")
        call = state.begin(timestep, torch.zeros(4, 4, 8, 8))
        found = [around(state, x, call) for x in pieces]
        assert len(matches) == count
        for x, out, plan in zip(pieces, found, matches[-2:], strict=True):
            torch.testing.assert_close(out, plan.unmerge(plan.merge(x) * 2))


# --- the time, as a host tells it -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, most, wrong", [
    ("percent", "to 1", (5, 1.0001, 10**400)), ("timestep", "up", (math.inf,)), ("sigma", "up", (math.inf,)),
])  # fmt: skip
def test_what_is_no_time_is_refused_with_its_range_and_what_is_no_number_with_its_type(name, most, wrong):
    state = state_of(MergeConfig(end_percent=0.5), 1)
    for value in (math.nan, -math.inf, -0.1, *wrong):
        with pytest.raises(ValueError) as caught:
            state.set_time(**{name: value})
        assert str(caught.value) == f"{name}={value!r} is no time; use a number from 0 {most}"
    for value in ("0.5", True, torch.tensor(0.5)):
        with pytest.raises(TypeError, match=rf"^{name}=.*{type(value).__name__}; use a number$"):
            state.set_time(**{name: value})
    for value in (0, 1.0):
        state.set_time(**{name: value})
        assert state.time._is_given


@pytest.mark.parametrize("name, wrong", [
    ("timesteps", ([500.0, -1.0], [500.0, math.nan])), ("pictures", (0, -1, 1.5, "2", True)),
])  # fmt: skip
def test_what_is_no_pass_is_refused(name, wrong):
    state = state_of(MergeConfig(), 1)
    for value in wrong:
        with pytest.raises(ValueError, match=f"{name}="):
            state.set_time(timestep=500.0, **{name: value})
        with pytest.raises(ValueError, match=f"{name}="), state.sampling(**{name: value}):
            pass
