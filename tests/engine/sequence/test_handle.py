"""A transformer's handle: what it keeps and for whom, and what it leaves alone and says of it."""

from __future__ import annotations

import logging

import pytest
import torch

from tests.sequences import FILM, HEADS, PICTURE, host, sdpa, tensors
from tome_core import MergeConfig, preset, strength
from tome_core.merging.layout import Layout, SequenceMerging
from tome_core.sequence import handle as handles

KEPT = MergeConfig(side="kv", ratio=0.9375, sx=4, sy=4, metric="keys+values", use_rand=False, refine=1, keep=60.0)


@pytest.fixture(autouse=True)
def sampling_needs_no_gradients():
    with torch.no_grad():  # under which alone anything is kept
        yield


@pytest.fixture(name="done")
def done_for_plans(monkeypatch) -> list[str]:
    """ "match" or "renew", an entry for each."""
    done, plain = [], handles.match

    def noted(k, v, layout, rule, draw, old):
        done.append("renew" if old is not None else "match")
        return plain(k, v, layout, rule, draw, old)

    monkeypatch.setattr(handles, "match", noted)
    return done


def step(merging, timestep, own=None, names=("a",), called=None, sampling="s", pictures=None, layout=PICTURE):
    """A call of a model with attentions of these names; their outputs."""
    own = own or tensors(layout)
    merging.set_time(timestep=timestep, sampling=sampling, pictures=pictures)
    latent = own.q[:, layout.first :, :1, :1].transpose(1, 3)  # of equal samples equal
    call = merging.begin(timestep, latent, called)
    return [merging.attend(call, name, host(), *own, HEADS, layout) for name in names]


def test_off_leaves_every_call_to_its_host():
    own = tensors(PICTURE)
    for config in (strength(0), MergeConfig(ratio=0.0), MergeConfig(side="kv", end_percent=0.0)):
        merging = SequenceMerging(config)
        merging.set_time(percent=0.5)
        call = merging.begin(500, own.q)
        assert merging.attend(call, "a", host(), *own, HEADS, PICTURE) is None
        report = merging.report()
        assert not report.merged_anything and report.work_saved == 0 and report.reasons


@pytest.mark.parametrize("layout", [PICTURE, FILM])
def test_what_it_gives_is_near_and_counted(layout):
    own = tensors(layout, behind=2)
    merging = SequenceMerging(KEPT, downsample=2, blocks=3)
    (out,) = step(merging, 500, own, layout=layout)
    exact = sdpa(*own)
    assert 0 < (out - exact).norm() < 0.2 * exact.norm()
    (level,) = merging.report().levels
    assert (level.downsample, level.blocks) == (2, 3)
    ((before, queries, keys),) = level.tokens
    assert before == queries == own.q.shape[1] and keys < before / 8
    assert level.work_saved == 1 - keys / before


def test_queries_merge_too_where_the_side_is_theirs():
    own = tensors(PICTURE, behind=2)
    config = MergeConfig(ratio=0.5, metric="keys+values", use_rand=False)
    (out,) = step(SequenceMerging(config), 500, own)
    exact = sdpa(*own)
    assert out.shape == exact.shape and 0 < (out - exact).norm() < 0.3 * exact.norm()
    torch.testing.assert_close(out[:, :7], exact[:, :7], rtol=0.2, atol=0.1)  # text, by itself


def test_a_match_serves_following_steps_and_is_renewed_after_them(done):
    merging = SequenceMerging(KEPT)
    for timestep in (900, 850, 800, 790, 700):
        step(merging, timestep, names=("a", "b"))
    assert done == ["match"] * 2 + ["renew"] * 4  # at 900; 800, 700


def test_a_match_serves_no_other_sampling_and_nothing_outside_of_one(done):
    merging = SequenceMerging(KEPT)
    step(merging, 500, sampling="one")
    step(merging, 500, sampling="two")
    step(merging, 490, sampling=None)
    step(merging, 480, sampling=None)
    assert done == ["match"] * 4


def test_calls_with_names_find_their_own_in_any_order(done):
    merging, one, two = SequenceMerging(KEPT), tensors(PICTURE, seed=1), tensors(PICTURE, seed=2)
    expected = [step(merging, 500, own, called=name)[0] for own, name in ((one, "one"), (two, "two"))]
    found = [step(merging, 480, own, called=name)[0] for own, name in ((two, "two"), (one, "one"))]
    assert done == ["match"] * 2
    for out, kept in zip(found[::-1], expected, strict=True):
        torch.testing.assert_close(out, kept)


def test_guidances_copies_have_one_match(done, monkeypatch):
    merging, own = SequenceMerging(KEPT), tensors(PICTURE, batch=1)
    twice = type(own)(*(torch.cat([one, one + 0.01 * torch.randn_like(one)]) for one in own))
    twice.q[1] = twice.q[0]  # of which `step` makes the latents
    seen, plain = [], handles._correct
    monkeypatch.setattr(handles, "_correct", lambda *args: seen.append(args[2].plan.group) or plain(*args))
    step(merging, 500, twice, pictures=1)
    assert done == ["match"] and seen[0].shape[0] == 1


@pytest.mark.parametrize("layout, why", [
    (Layout(PICTURE.grid, 1000), "the tokens are not the picture's grid"),
    (Layout(type(PICTURE.grid)(1, 2), 0), "too small"),
])  # fmt: skip
def test_what_does_not_fit_is_left_alone_and_said(layout, why):
    own = tensors(PICTURE)
    merging = SequenceMerging(MergeConfig(side="kv", ratio=0.25, use_rand=False))
    call = merging.begin(500, own.q)
    assert merging.attend(call, "a", host(), *own, HEADS, layout) is None
    assert any(why in reason for reason in merging.report().reasons)


def test_gradients_reach_queries_keys_and_values():
    own = tensors(PICTURE, batch=1)
    own = type(own)(*(one.requires_grad_() for one in own))
    merging = SequenceMerging(KEPT)
    call = merging.begin(500, own.q)
    with torch.enable_grad():
        merging.attend(call, "a", host(), *own, HEADS, PICTURE).sum().backward()
    assert all(one.grad.abs().sum() > 0 for one in own)


def test_maps_are_of_the_picture_alone():
    merging = SequenceMerging(KEPT)
    merging.keep_maps()
    step(merging, 500, layout=FILM, own=tensors(FILM, behind=3))
    found = merging.maps()[0]
    assert tuple(found.grid[:2]) == (8, 12) and found.group.shape[1] == 8 * 12


def test_it_is_said_once_that_presets_are_unproven_here(caplog):
    handles._say_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            SequenceMerging(preset("balanced"))
    assert [one.getMessage() for one in caplog.records] == [handles.UNPROVEN]


