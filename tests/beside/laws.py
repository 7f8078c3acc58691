"""Laws of our patch and foreign things on one model, in any order."""

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch

import tome_core
from tests.beside.models import TIMES, UNETS, Beside
from tests.beside.things import THINGS as OTHERS
from tests.beside.things_below import BELOW
from tests.small_models.dits import distance as far
from tests.small_models.unets import merge_with_self
from tests.watching.traces import drop_own_methods, traces
from tome_core import MergeConfig, MergeRule
from tome_core.reporting.ledger import REPLACED

THINGS = OTHERS | BELOW
SETTINGS = {"strength": 0.25, "only_if_it_pays": False}
# a transformer's strength merges nothing so late in a picture, and no attentions
_OF_TRANSFORMERS = MergeConfig(rules=(
    MergeRule(ratio=0.5, side="kv", metric="keys+values", sx=4, sy=4, use_rand=False, keep=60.0),
    MergeRule(ratio=0.5, sx=2, sy=1, use_rand=False, merge_attn=False, merge_blocks=True)))  # fmt: skip
# tolerances: a share of the unmerged picture for other sums, and shares of a thing's effect, in size and in place
EQUAL, SIZE, PLACE = 1e-4, 0.1, 0.5


def settings_of(name: str) -> dict[str, Any]:
    return SETTINGS if name in UNETS else {"config": _OF_TRANSFORMERS}


class Case(NamedTuple):
    """things: in the order of coming; the last leaves first. before, after: how many come and leave before us."""

    model: str
    things: tuple[str, ...]
    before: int
    after: int


class Alone(NamedTuple):
    """A model with foreign things and without our patch. calls: of attentions; while_on, afterwards: traces on it."""

    pictures: torch.Tensor
    calls: int
    while_on: str
    afterwards: str


@cache
def alone(name: str, things: tuple[str, ...] = ()) -> Alone:
    """Draw with the things on the model. Raises AssertionError if they do not leave the model as it was."""
    beside = Beside(name)
    first = beside.draw(TIMES[:1])
    for _ in range(2):  # the second round begins with what the things left on the model
        drop_own_methods(beside.model)
        with ExitStack() as stack:
            for thing in things:
                stack.enter_context(THINGS[thing].on(beside))
            pictures, while_on = beside.draw(), str(traces(beside.model))
            calls = beside.calls_of_attentions()
    assert pictures.isfinite().all() and torch.equal(beside.draw(TIMES[:1]), first)
    drop_own_methods(beside.model)
    return Alone(pictures, calls, while_on, str(traces(beside.model)))


class Merged(NamedTuple):
    """A merged model's pictures, and the paths of the blocks that ran on fewer tokens."""

    pictures: torch.Tensor
    few: frozenset[str]


@cache
def merged_alone(name: str, off: frozenset[int] = frozenset(), whole: frozenset[str] = frozenset()) -> Merged:
    """Draw with our patch alone. off: levels whose attentions do not merge; whole: blocks that do not."""
    beside = Beside(name)
    handle = tome_core.patch(beside.whole, **settings_of(name))
    downs, rules = [level.downsample for level in handle.report().levels if level.level not in off], []
    for rule in handle.config.rules:
        if rule.merge_attn and off:
            rules += [replace(rule, min_downsample=down, max_downsample=down) for down in downs]
        elif rule.merge_attn or not whole.issuperset(beside.later):
            rules.append(rule)
    for path in () if whole.issuperset(beside.later) else whole:
        beside.blocks[path].register_forward_hook(lambda *_: None)
    with tome_core.patch(beside.whole, replace(handle.config, rules=tuple(rules))) as handle:
        return merged(beside, handle)


def merged(beside: Beside, handle: Any) -> Merged:
    with handle.sampling(), beside.few() as few:
        pictures = beside.draw()
    return Merged(pictures, frozenset(few))


class Both(NamedTuple):
    """Closing `ours` takes our patch off, closing one of `its` takes that thing off."""

    handle: Any
    ours: ExitStack
    its: list[ExitStack]

    def close(self, count: int) -> None:
        for its in self.its[::-1][:count]:
            its.close()


@contextmanager
def together(beside: Beside, case: Case) -> Iterator[Both]:
    """Put all things and our patch on a model."""
    drop_own_methods(beside.model)
    ours, its = ExitStack(), [ExitStack() for _ in case.things]
    for stack, thing in zip(its[: case.before], case.things, strict=False):
        stack.enter_context(THINGS[thing].on(beside))
    both = Both(ours.enter_context(tome_core.patch(beside.whole, **settings_of(case.model))), ours, its)
    if not case.before:
        beside.draw(TIMES[:1])
        both.handle.reset_counts()
    for stack, thing in list(zip(its, case.things, strict=True))[case.before :]:
        stack.enter_context(THINGS[thing].on(beside))
    try:
        yield both
    finally:
        both.close(case.after)
        ours.close()
        both.close(len(its))


def counted(report: Any) -> tuple[int, dict[str, int]]:
    """Return how many calls of attentions merged, and the reasons for the others with their numbers."""
    on = sum(count for level in report.levels for (part, *_), count in level.merged.items() if part == "attn")
    off = sum((Counter(level.reasons) for level in report.levels), Counter())
    return on, {why: count for why, count in off.items() if why.startswith("attn: ")}


def levels_of(report: Any) -> tuple[set[int], set[int]]:
    """Return the levels with attentions that merged outside of merged blocks, and those with attentions left alone."""
    on = {level.level for level in report.levels for part, tokens, queries, _ in level.merged
          if part == "attn" and queries == tokens}  # fmt: skip
    return on, {level.level for level in report.levels for why in level.reasons if why.startswith("attn: ")}


def assert_counted(report: Any, calls: int) -> None:
    """All calls are counted as merged or as left alone, unless our patch was not called or is gone."""
    on, off = counted(report)
    is_named = not report.calls and REPLACED in report.headline
    assert on + sum(off.values()) >= calls or is_named or not report.patched, (on, off, calls)


def hold(case: Case) -> None:
    beside, its, plain = Beside(case.model), alone(case.model, case.things), alone(case.model).pictures
    with pytest.MonkeyPatch.context() as patches, together(beside, case):
        merge_with_self(patches)
        assert far(beside.draw(TIMES[:1]), its.pictures[:1]) < EQUAL, "every token its own group"
    with together(beside, case) as both:
        out = merged(beside, both.handle)
        report = both.handle.report()
        judge_report(case, beside, report)
        assert_effect(case, plain, out, report)
        leave(case, beside, both)
    tome_core.remove_patch(beside.whole)
    drop_own_methods(beside.model)
    assert str(traces(beside.model)) == its.afterwards, "something is left on the model"
    assert torch.equal(beside.draw(TIMES[:1]), plain[:1]), "all removed: other bits"


def assert_effect(case: Case, plain: torch.Tensor, out: Merged, report: Any) -> None:
    """Things have the effect that they have without us, as seen beside a model that merges in the same places."""
    its, (on, off) = alone(case.model, case.things).pictures, levels_of(report)
    whole = merged_alone(case.model).few - out.few
    is_named = any(why.startswith("block: ") for why in report.reasons)
    assert not (whole and report.calls) or is_named, f"no word of whole blocks: {sorted(whole)}"
    if not on and not out.few:
        assert torch.equal(out.pictures, its), "nothing merged: other bits"
        return
    if on & off:
        return
    reference = merged_alone(case.model, frozenset(off), whole)
    assert reference.few == out.few, "blocks merge in other places"
    effect, change = its - plain, out.pictures - reference.pictures
    size, least = effect.norm(), EQUAL * its.norm()
    assert (change - effect).norm() <= max(PLACE * size, least), "its effect is elsewhere"
    assert abs(change.norm() - size) <= max(SIZE * size, least), f"effect times {change.norm() / size:.2f}"


def judge_report(case: Case, beside: Beside, report: Any) -> None:
    """A call is left alone only because of a thing, and all calls are counted."""
    things, (on, off) = [THINGS[name] for name in case.things], counted(report)
    reasons = "|".join([thing.reason for thing in things] + ["its place: tests.beside"] * (len(things) > 1))
    assert all(re.search(reasons, why) for why in off), f"reasons {off}, expected {reasons}"
    if len(things) > 1:
        assert_counted(report, 1)
        return
    assert_counted(report, alone(case.model, case.things).calls)
    left = things[0].left
    assert left is None or bool(off) == ((beside.is_by_hand, case.before == 0) in left), f"{on} merged, {off}"


def leave(case: Case, beside: Beside, both: Both) -> None:
    """If we leave first, nothing of ours stays; if all things leave first, we merge as if they had never been there."""
    things, its, without = case.things, alone(case.model, case.things), merged_alone(case.model).pictures
    both.close(case.after)
    if case.after == len(things) == 1:
        both.handle.reset_counts()
        beside.draw()
        report = both.handle.report()
        assert_counted(report, beside.calls_of_attentions() if report.calls else 0)
        assert report.patched or THINGS[things[0]].takes_us
        if report.patched:
            with both.handle.sampling():
                assert torch.equal(beside.draw(), without), "it left: other bits"
    both.ours.close()
    if case.after == 0:
        assert len(things) > 1 or str(traces(beside.model)) == its.while_on, "we left: something is left on the model"
        assert torch.equal(beside.draw(TIMES[:1]), its.pictures[:1]), "we left: other bits"
        both.close(len(things))
        with tome_core.patch(beside.whole, **settings_of(case.model)) as again, again.sampling():
            assert torch.equal(beside.draw(), without), "merged again: other bits"
