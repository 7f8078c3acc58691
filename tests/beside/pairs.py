"""A random case by its seed and number: a model, two foreign things, who came first, and who leaves first.

What two things do together nobody can look up, so a case first asks the model without merging. Where that raises, or
where they do not leave the model as it was, there is no case.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from contextlib import ExitStack
from typing import Any, NamedTuple

import pytest
import torch

import tome_core
from tests.beside.laws import EQUAL, PLACE, SETTINGS, SIZE, assert_counted, counted, far, merged, unmerged
from tests.beside.models import MODELS, TIMES, Beside
from tests.beside.things import THINGS
from tests.models import merge_with_self
from tests.traces import drop_own_methods, traces

COMMAND = "python -m tests.beside"
_OF_CLASSES = ("another method of the class", "another class of attentions")
PAIR, NO_PAIR = "pairs", "pairs that fail without merging"


class Pair(NamedTuple):
    """things: in the order in which they come. before, after: how many of them come before us, and leave before us; the
    last one leaves first.
    """

    name: str
    things: tuple[str, str]
    before: int
    after: int


class Together:
    """A model with both things, and us. Each is taken off by its own stack."""

    def __init__(self, beside: Beside, pair: Pair, with_us: bool = True) -> None:
        self.beside, self.pair, self.with_us = beside, pair, with_us
        self.ours, self.its = ExitStack(), [ExitStack() for _ in pair.things]
        self.called = self.patched = beside.whole
        self.handle: Any = None

    def __enter__(self) -> Together:
        drop_own_methods(self.beside.model)
        for place, (thing, its) in enumerate(zip(self.pair.things, self.its, strict=True)):
            self._merge_before(place)
            self.called = its.enter_context(THINGS[thing].on(self.beside)) or self.called
        self._merge_before(len(self.its))
        return self

    def _merge_before(self, place: int) -> None:
        if self.with_us and place == self.pair.before:
            self.patched = self.called
            self.handle = self.ours.enter_context(tome_core.patch(self.patched, **SETTINGS))

    def draw(self, times: tuple[int, ...] = TIMES) -> torch.Tensor:
        return self.beside.draw(self.called, times)

    def leave(self) -> torch.Tensor | None:
        """Whoever leaves before us, then us. Returns what is drawn then by what is left."""
        for its in self.its[::-1][: self.pair.after]:
            its.close()
        self.ours.close()
        return self.draw(TIMES[:1]) if self.pair.after == 0 else None

    def __exit__(self, *error: Any) -> None:
        if self.with_us and error[0] is None:
            self.leave()
        self.ours.close()
        for its in self.its[::-1]:
            its.close()


def drawn(dice: random.Random) -> tuple[Pair, Beside]:
    """The pair of these dice."""
    beside = Beside(dice.choice(MODELS))
    fitting = [name for name, one in THINGS.items() if name != "nothing" and one.fits(beside)]
    # who has saved a method does not see that it, or its object's class, is another one then; through us it would
    things = sorted(dice.sample(fitting, 2), key=lambda name: name not in _OF_CLASSES)
    return Pair(beside.name, tuple(things), dice.randrange(3), dice.randrange(3)), beside


def run(seed: int, number: int) -> Counter:
    """What became of the case; raises AssertionError, which names it, where a law is broken."""
    pair, beside = drawn(random.Random(f"{seed} {number}"))
    try:
        return hold(pair, beside)
    except Exception as error:
        raise AssertionError(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}: {pair}") from error


def hold(pair: Pair, beside: Beside) -> Counter:
    """As of `run`."""
    plain, alone = unmerged(pair.name), merged(pair.name)
    try:
        for _ in range(2):  # the second time on what they have left on the model
            with Together(beside, pair, with_us=False) as both:
                expected, later = both.draw(), both.draw(TIMES[:1])
            is_pair = expected.isfinite().all() and torch.equal(beside.draw(times=TIMES[:1]), plain[:1])
    except Exception:
        is_pair = False
    if not is_pair:
        return Counter({NO_PAIR: 1})
    drop_own_methods(beside.model)
    before = traces(beside.model)
    with pytest.MonkeyPatch.context() as patches, Together(beside, pair) as both:
        merge_with_self(patches)
        assert far(both.draw(TIMES[:1]), expected[:1], expected[:1]) < EQUAL, "every token its own group"
    with Together(beside, pair) as both:
        with both.handle.sampling():
            out, report = both.draw(), both.handle.report()
        is_caching = any("cache" in one for one in pair.things)
        left = None if is_caching else both.leave()
    # a copy's wrapper may go on calling the original, which merges
    is_copy = both.called is not both.patched and not report.calls
    assert left is None or torch.equal(left, later), "removed: other bits"
    on, off = counted(report)
    if is_copy or not on:
        assert torch.equal(out, expected), "nothing merged: other bits"
    if not is_copy:
        assert_counted(report, 1)
        named = "|".join(["its place: tests.beside", *(THINGS[one].found for one in pair.things)])
        assert all(re.search(named, why) for why in off), f"reasons {off}, expected {named}"
        if on and not off:
            effect, size = expected - plain, (expected - plain).norm()
            found, least = out - alone, EQUAL * expected.norm()
            off_by = (found - effect).norm()
            assert off_by <= max(PLACE * size, least), f"effect off by {off_by / size:.2f}"
            assert abs(found.norm() - size) <= max(SIZE * size, least), f"effect times {found.norm() / size:.2f}"
    tome_core.remove_patch(beside.whole)
    drop_own_methods(beside.model)
    assert traces(beside.model) == before, "something is left on the model"
    assert torch.equal(beside.draw(times=TIMES[:1]), plain[:1]), "all removed: other bits"
    return Counter({PAIR: 1, "merged" if on and not off else "in part" if on else "left alone": 1})
