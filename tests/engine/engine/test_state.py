"""The seam: what an adapter gives of a call, what it gets back, and what is counted and said of it."""

from __future__ import annotations

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


def attend(config, own, layout=PICTURE, timestep=500, **facts):
    """The output of one attention in one call, and what is reported."""
    state = state_of(config, 2, **facts)
    call = state.begin(timestep, own.q[:, layout.first :, :1, :1].transpose(1, 3))
    return state.attend(call, "a", 0, layout, own), state.report()


@pytest.mark.parametrize("config", [strength(0), MergeConfig(ratio=0.0), MergeConfig(side="kv", end_percent=0.0)])
def test_off_leaves_every_call_to_its_host(config):
    out, report = attend(config, attention(PICTURE))
    assert out is None
    assert not report.merged_anything and report.work_saved == 0 and report.reasons


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


@pytest.mark.parametrize("layout, why", [
    (Layout(PICTURE.grid, 1000), "the tokens are not the picture's grid"),
    (Layout(Grid(1, 2)), "too small"),
])  # fmt: skip
def test_what_does_not_fit_is_left_alone_and_said(layout, why):
    out, report = attend(MergeConfig(side="kv", ratio=0.25, use_rand=False), attention(PICTURE), layout)
    assert out is None and any(why in reason for reason in report.reasons)


def test_keys_of_other_tokens_are_left_alone():
    own = attention(PICTURE, behind=4)
    out, report = attend(STRONG, own._replace(k=own.k[:, :-4], v=own.v[:, :-4]))
    assert out is None and any("not the picture's grid" in reason for reason in report.reasons)


@pytest.mark.parametrize(("takes_bias", "proportional", "ways"), [
    (True, True, {"bias": 1}), (False, True, {"bias, by torch's own function": 1}), (True, False, {}),
])  # fmt: skip
def test_the_way_of_sizes_is_reported(takes_bias, proportional, ways):
    config = MergeConfig(side="kv", ratio=0.5, proportional=proportional, use_rand=False)
    out, report = attend(config, attention(PICTURE, takes_bias=takes_bias))
    assert out is not None and report.levels[0].sized_by == ways


def test_a_rule_of_other_parts_leaves_attention_alone():
    out, report = attend(MergeConfig(rules=(MergeRule(merge_attn=False, merge_mlp=True),)), attention(PICTURE))
    assert out is None and list(report.reasons) == ["attn: its rule merges other parts"]


def test_samples_differ_in_their_draws_if_they_differ_in_time_and_a_number_is_a_tensor():
    one = attention(PICTURE, batch=1)
    twice = one._replace(**{name: getattr(one, name).repeat(2, 1, 1, 1) for name in "qkv"})
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
    assert all(one.grad.abs().sum() > 0 for one in own[:3])


def test_maps_are_of_the_picture_alone_and_of_a_film_its_first_frame():
    state = state_of(STRONG, 2)
    own = attention(FILM, behind=3)
    state.attend(state.begin(500, own.q), "a", 0, FILM, own)
    assert not state.maps(), "nobody asked for them"
    state.keep_maps()
    state.attend(state.begin(500, own.q), "a", 0, FILM, own)
    found = state.maps()[0]
    assert tuple(found.grid[:2]) == (8, 12) and found.group.shape == (2, 8 * 12)
    state.reset_counts()
    assert not state.maps() and not state.report().calls
