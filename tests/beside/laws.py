"""What is expected of a model on which foreign things and merging stand, whoever comes first and whoever leaves first:
its picture is right, or is left alone and the report says so; and nothing of us stays.
"""

from __future__ import annotations

import re
from collections import Counter
from contextlib import ExitStack
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch

import tome_core
from tests.beside.models import TIMES, Beside
from tests.beside.things import THINGS
from tests.models import merge_with_self
from tests.traces import drop_own_methods, traces
from tome_core.reporting.ledger import REPLACED

SETTINGS = {"strength": 0.25, "only_if_it_pays": False}
# shares of the unmerged picture: what other sums make of it; and of a thing's effect, by which it may differ merged
EQUAL, SIZE, PLACE = 1e-4, 0.1, 0.5


class Case(NamedTuple):
    """things: in the order in which they come. before, after: how many of them come before us, and leave before us; the
    last one leaves first.
    """

    model: str
    things: tuple[str, ...]
    before: int
    after: int


class Alone(NamedTuple):
    """A model with foreign things and without us. while_on, afterwards: what is on it."""

    pictures: torch.Tensor
    while_on: str
    afterwards: str


@cache
def alone(name: str, things: tuple[str, ...] = ()) -> Alone:
    """Raises AssertionError if the things do not leave the model as it was."""
    beside = Beside(name)
    first = beside.draw(TIMES[:1])
    for _ in range(2):  # the second time on what they have left on the model
        with Together(beside, Case(name, things, 0, 0), with_us=False):
            pictures, while_on = beside.draw(), str(traces(beside.model))
    assert pictures.isfinite().all() and torch.equal(beside.draw(TIMES[:1]), first)
    drop_own_methods(beside.model)
    return Alone(pictures, while_on, str(traces(beside.model)))


@cache
def merged_alone(name: str) -> torch.Tensor:
    beside = Beside(name)
    with tome_core.patch(beside.whole, **SETTINGS) as handle, handle.sampling():
        return beside.draw()


@cache
def calls(name: str, thing: str) -> int:
    """Of attentions, for two pictures beside the thing."""
    beside = Beside(name)
    if THINGS[thing].is_slow:  # a hook would make other graphs of it
        return beside.calls_of_attentions()
    with THINGS[thing].on(beside):
        return beside.calls_of_attentions()


class Together:
    """A model with all things, and us; each is taken off by its own stack."""

    def __init__(self, beside: Beside, case: Case, with_us: bool = True) -> None:
        self.beside, self.case, self.with_us = beside, case, with_us
        self.ours, self.its = ExitStack(), [ExitStack() for _ in case.things]
        self.handle: Any = None

    def __enter__(self) -> Together:
        drop_own_methods(self.beside.model)
        for place, (thing, its) in enumerate(zip(self.case.things, self.its, strict=True)):
            self._merge_before(place)
            its.enter_context(THINGS[thing].on(self.beside))
        self._merge_before(len(self.its))
        return self

    def _merge_before(self, place: int) -> None:
        if self.with_us and place == self.case.before:
            self.handle = self.ours.enter_context(tome_core.patch(self.beside.whole, **SETTINGS))
            if place == 0:
                self.beside.draw(TIMES[:1])
                self.handle.reset_counts()

    def close(self, count: int) -> None:
        """Of the things, the last ones."""
        for its in self.its[::-1][:count]:
            its.close()

    def __exit__(self, *error: Any) -> None:
        self.close(self.case.after)
        self.ours.close()
        self.close(len(self.its))


def counted(report: Any) -> tuple[int, dict[str, int]]:
    """Calls of attentions that merged, and reasons for those that did not."""
    on = sum(count for level in report.levels for (part, *_), count in level.merged.items() if part == "attn")
    off = sum((Counter(level.reasons) for level in report.levels), Counter())
    for level in report.levels:
        off.update({f"attn: {why}": report.calls * level.blocks for why in level.traced})
    return on, {why: count for why, count in off.items() if why.startswith("attn: ")}


def assert_counted(report: Any, calls: int) -> None:
    """As merged, or as left with a reason; unless nothing of us is there any more that could count, or was called."""
    on, off = counted(report)
    is_named = not report.calls and REPLACED in report.headline
    assert on + sum(off.values()) >= calls or is_named or not report.patched, (on, off, calls)


def far(picture: torch.Tensor, other: torch.Tensor, of: torch.Tensor) -> float:
    assert picture.isfinite().all()
    return ((picture - other).norm() / of.norm()).item()


def hold(case: Case) -> str:
    """What became of it; raises AssertionError if a law is broken."""
    beside, its = Beside(case.model), alone(case.model, case.things)
    plain, merged = alone(case.model).pictures, merged_alone(case.model)  # now: a thing may change a class of all
    with pytest.MonkeyPatch.context() as patches, Together(beside, case):
        merge_with_self(patches)
        expected = its.pictures[:1]
        assert far(beside.draw(TIMES[:1]), expected, expected) < EQUAL, "every token its own group"
    with Together(beside, case) as both:
        with both.handle.sampling():
            out, report = beside.draw(), both.handle.report()
        _judge_report(case, beside, report)
        on, off = counted(report)
        if not on:
            assert torch.equal(out, its.pictures), "nothing merged: other bits"
        if on and not off:
            effect, found = its.pictures - plain, out - merged
            size, least = effect.norm(), EQUAL * its.pictures.norm()
            assert (found - effect).norm() <= max(PLACE * size, least), (
                f"effect off by {far(found, effect, effect):.2f}"
            )
            assert abs(found.norm() - size) <= max(SIZE * size, least), f"effect times {found.norm() / size:.2f}"
        _leave(case, both, its)
    tome_core.remove_patch(beside.whole)
    drop_own_methods(beside.model)
    assert str(traces(beside.model)) == its.afterwards, "something is left on the model"
    assert torch.equal(beside.draw(TIMES[:1]), plain[:1]), "all removed: other bits"
    return "merged" if on and not off else "in part" if on else "left alone"


def _judge_report(case: Case, beside: Beside, report: Any) -> None:
    """What is left alone is so for a thing's sake, and all calls are counted."""
    things, (on, off) = [THINGS[name] for name in case.things], counted(report)
    reasons = "|".join([thing.reason for thing in things] + ["its place: tests.beside"] * (len(things) > 1))
    assert all(re.search(reasons, why) for why in off), f"reasons {off}, expected {reasons}"
    if len(things) > 1:
        assert_counted(report, 1)
        return
    assert_counted(report, calls(case.model, *case.things))
    assert bool(off) == ((beside.is_by_hand, case.before == 0) in things[0].left), f"{on} merged, {off}"


def _leave(case: Case, both: Together, its: Alone) -> None:
    """Nothing of us stays if we leave first; if all others leave first, we merge as if they had never been there."""
    things, beside, merged = [THINGS[name] for name in case.things], both.beside, merged_alone(case.model)
    both.close(case.after)
    if case.after == len(things) == 1:
        both.handle.reset_counts()
        beside.draw()
        report = both.handle.report()
        assert_counted(report, beside.calls_of_attentions() if report.calls else 0)
        assert report.patched or things[0].takes_us
        if report.patched:
            with both.handle.sampling():
                assert torch.equal(beside.draw(), merged), "it left: other bits"
    both.ours.close()
    if case.after == 0:
        if len(things) == 1:
            assert str(traces(beside.model)) == its.while_on, "we left: something is left on the model"
        assert torch.equal(beside.draw(TIMES[:1]), its.pictures[:1]), "we left: other bits"
        both.close(len(things))
        with tome_core.patch(beside.whole, **SETTINGS) as again, again.sampling():
            assert torch.equal(beside.draw(), merged), "merged again: other bits"
