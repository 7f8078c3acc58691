"""Wraps come onto a UNet once a sampling, merge in their own branch's calls alone, and are gone after it."""

from __future__ import annotations

import pytest
import torch

from comfy_nodes import host
from tests.comfy_doubles import Guider, apply, least_checkpoint
from tests.models import inputs
from tests.traces import traces

HALF = {"ratio": 0.5, "use_rand": False}
QUARTER = {**HALF, "ratio": 0.25}


def branch(plain, **values):
    return apply(plain, **(values or HALF))


def sample(patcher, **options):
    return Guider(patcher).sample(**{"steps": 3, "size": (8, 8), **options})


def the_handle(applied):
    (handle,) = host.find_attached(applied)._patches.values()
    return handle


def counted(monkeypatch, handle):
    """The calls of attach and detach, from now on."""
    calls = []
    for name in ("attach", "detach"):
        method = getattr(handle, name)
        monkeypatch.setattr(handle, name, lambda name=name, method=method: (calls.append(name), method()))
    return calls


def test_they_come_on_once_a_sampling_and_go_with_it(monkeypatch):
    applied = branch(least_checkpoint())
    before = traces(applied.model)
    first = sample(applied)
    calls = counted(monkeypatch, the_handle(applied))
    seen = []
    assert torch.equal(sample(applied, stop=lambda step: seen.append(traces(applied.model) == before)), first)
    assert calls == ["attach", "detach"] and seen == [False] * 3
    assert traces(applied.model) == before


def test_while_they_are_on_nobody_else_merges():
    plain = least_checkpoint()
    applied, inner = branch(plain), []
    expected, alone = sample(plain), sample(applied)
    merged = sample(applied, stop=lambda step: inner.append(sample(plain)))
    assert torch.equal(merged, alone) and all(torch.equal(one, expected) for one in inner)


def test_two_branches_of_one_model_inside_each_other_merge_as_each_says():
    plain = least_checkpoint()
    before = traces(plain.model)
    half, quarter, inner = branch(plain), branch(plain, **QUARTER), []
    alone = {"half": sample(branch(least_checkpoint())), "quarter": sample(branch(least_checkpoint(), **QUARTER))}
    merged = sample(half, stop=lambda step: inner.append(sample(quarter)))
    assert torch.equal(merged, alone["half"]) and all(torch.equal(one, alone["quarter"]) for one in inner)
    assert not torch.equal(*alone.values()) and traces(plain.model) == before


def test_a_branch_inside_itself_keeps_its_wraps_until_the_outer_sampling_ends(monkeypatch):
    applied = branch(least_checkpoint())
    before, alone = traces(applied.model), sample(applied)
    calls, inner = counted(monkeypatch, the_handle(applied)), []
    assert torch.equal(sample(applied, stop=lambda step: inner.append(sample(applied))), alone)
    assert all(torch.equal(one, alone) for one in inner)
    assert calls == ["attach", "detach"] and traces(applied.model) == before


def test_a_call_of_the_model_inside_its_own_call_merges_too():
    applied = branch(least_checkpoint())
    expected, depth = sample(applied), []

    def twice(run, *args):
        if not depth:
            depth.append(1)
            run.class_obj.apply_model(*args[:2], args[3], args[5])
            depth.clear()
        return run(*args)

    again = applied.clone()
    again.add_wrapper_with_key("apply_model", "again", twice)
    assert torch.equal(sample(again), expected)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_inner_sampling_that_breaks_off_leaves_the_outer_one_as_it_was(error):
    plain = least_checkpoint()
    before, half, quarter = traces(plain.model), branch(plain), branch(plain, **QUARTER)
    alone = sample(half)

    def fail(step):
        raise error

    def inner(step):
        with pytest.raises(error):
            sample(quarter, stop=fail)

    assert torch.equal(sample(half, stop=inner), alone) and traces(plain.model) == before


def test_a_call_outside_of_any_sampling_merges_and_leaves_nothing():
    applied = branch(least_checkpoint(), **HALF, keep=1000.0)
    before = traces(applied.model)
    x, text = inputs(4, 2, 8, 8)
    outs = []
    with torch.no_grad():
        for wrappers in (applied.wrappers["apply_model"], {}):
            options = {"wrappers": {"apply_model": wrappers}}
            outs.append(applied.model.apply_model(x, torch.full((2,), 3.0), text, options))
    assert not torch.equal(*outs) and traces(applied.model) == before
    assert not the_handle(applied).run.sampling._plans
