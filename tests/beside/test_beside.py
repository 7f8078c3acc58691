"""Whatever stands beside us, on whatever model, whoever came first: the picture is right, or is left alone and said so.

Foreign things (`tests.beside.things`) times models (`tests.beside.models`) times orders: a case is named after all
three.
"""

from __future__ import annotations

import re
from contextlib import ExitStack
from typing import Any
from zlib import crc32

import pytest
import torch

import tome_core
from tests.beside.laws import EQUAL, PLACE, SETTINGS, SIZE, assert_counted, calls, counted, far, merged, unmerged
from tests.beside.models import MODELS, QUICK, TIMES, Beside
from tests.beside.things import THINGS
from tests.models import merge_with_self
from tests.thoroughness import THOROUGH, some_quick
from tests.traces import drop_own_methods, traces


def _cases(law: str, quick: tuple[str, ...] = QUICK) -> Any:
    """What goes together. quick: models beside which a whole run puts each thing, and a quick one each thing once. Of
    the others it is every twentieth pair, others for each law; in a thorough run all.
    """
    found, seen = [], set()
    for name in (*quick, *(other for other in MODELS if other not in quick)):
        beside = Beside(name)
        for thing, one in THINGS.items():
            dice = crc32(f"{law} {name} {thing}".encode())
            if one.fits(beside) and (THOROUGH or name in quick or dice % 20 == 0):
                is_quick = name in quick and not one.is_slow and thing not in seen
                seen |= {thing}
                found.append(pytest.param(name, thing, marks=[pytest.mark.slow] * (not is_quick), id=f"{thing}-{name}"))
    return pytest.mark.parametrize("name, thing", found)


either_order = pytest.mark.parametrize("is_over", [False, True], ids=["it came first", "we came first"])


def put_on(beside: Beside, thing: str, is_over: bool, ours: ExitStack, its: ExitStack) -> tuple[Any, Any]:
    """Both, the second after a call beside the first. Returns what is called, and our handle."""
    handle = ours.enter_context(tome_core.patch(beside.whole, **SETTINGS)) if is_over else None
    if handle is not None:
        beside.draw(times=TIMES[:1])
        handle.reset_counts()
    model = its.enter_context(THINGS[thing].on(beside)) or beside.whole
    return model, handle or ours.enter_context(tome_core.patch(model, **SETTINGS))


@pytest.mark.parametrize("is_over", some_quick([False, True]), ids=["it came first", "we came first"])
@_cases("equal", ("ldm", "sd15"))
def test_if_every_token_is_its_own_group_the_picture_is_the_unmerged_one(name, thing, is_over, monkeypatch):
    merge_with_self(monkeypatch)
    beside, expected = Beside(name), unmerged(name, thing)[:1]
    with ExitStack() as both:
        model, _ = put_on(beside, thing, is_over, both, both)
        assert far(beside.draw(model, TIMES[:1]), expected, expected) < EQUAL


@pytest.mark.parametrize("we_leave_first", [False, True], ids=["it leaves first", "we leave first"])
@either_order
@_cases("leaves", ("Wan", "ldm"))
def test_whoever_leaves_first_nothing_of_merging_stays(name, thing, is_over, we_leave_first):
    one, plain, plain_with_it, count = THINGS[thing], unmerged(name), unmerged(name, thing), calls(name, "nothing")
    on_its_own = merged(name)
    times = TIMES if one.left is None else TIMES[:1]  # what is kept for every second call goes with that
    beside = Beside(name)
    with one.on(beside):  # of which something may stay without us as well
        beside.draw(times=times)
        with_it = str(traces(beside.model))
    drop_own_methods(beside.model)
    before = traces(beside.model)
    with ExitStack() as ours, ExitStack() as its:
        model, handle = put_on(beside, thing, is_over, ours, its)
        beside.draw(model, times)
        if we_leave_first:
            ours.close()
            assert str(traces(beside.model)) == with_it
            assert torch.equal(beside.draw(model, times), plain_with_it[: len(times)])
            its.close()
            with tome_core.patch(beside.whole, **SETTINGS) as again, again.sampling():
                assert torch.equal(beside.draw(), on_its_own)
        else:
            its.close()
            handle.reset_counts()
            model = beside.whole if is_over else model
            beside.draw(model)
            report = handle.report()
            assert_counted(report, count)
            assert report.patched or one.takes_us
            if report.patched:
                with handle.sampling():
                    assert torch.equal(beside.draw(model), on_its_own)
    tome_core.remove_patch(beside.whole)
    drop_own_methods(beside.model)
    assert traces(beside.model) == before and torch.equal(beside.draw(times=TIMES[:1]), plain[:1])


@either_order
@_cases("beside")
def test_what_it_does_it_does_beside_us_or_the_report_names_it(name, thing, is_over):
    beside, one = Beside(name), THINGS[thing]
    with ExitStack() as both:
        model, handle = put_on(beside, thing, is_over, both, both)
        with handle.sampling():
            out, report = beside.draw(model), handle.report()
    on, off = counted(report)
    plain, effect = unmerged(name, thing), unmerged(name, thing) - unmerged(name)
    if is_over and model is not beside.whole:  # a copy of what is patched
        assert not tome_core.report(model).patched and torch.equal(out, plain)
        return
    assert all(re.search(one.found, why) for why in off), off
    assert_counted(report, calls(name, thing))
    if one.left is not None:
        assert bool(off) == ((beside.is_by_hand, is_over) in one.left), f"{on} merged, {off}"
    if not on:
        assert torch.equal(out, plain)
    if not off:
        found, size = out - merged(name), effect.norm()
        assert (found - effect).norm() <= max(PLACE * size, EQUAL * plain.norm()), far(found, effect, effect)
        assert abs(found.norm() - size) <= max(SIZE * size, EQUAL * plain.norm()), found.norm() / size
