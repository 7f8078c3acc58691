"""One comparison: a picture without anything, with merging, with another method, and with both in both orders."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import numpy as np

import tome_core
from benchmarks.call_times import CallTimes
from benchmarks.stack_beside import Beside

PLAIN, MERGED, ALONE, OURS_FIRST, THEIRS_FIRST = ARMS = ("plain", "merged", "alone", "ours first", "theirs first")


class Drawn(NamedTuple):
    """A picture, the seconds of the UNet's calls, and what merging reported."""

    picture: np.ndarray
    seconds: float
    told: dict[str, Any]


def measure(pipelines: Any, beside: Beside, number: int, preset: str) -> dict[str, Any]:
    """A row. seconds: by arm, plain ones before and after; rms: how far each is from the plain picture, in its own
    units; from_alone: how far those with both are from the one with the other alone; told: what merging reported;
    off_is_exact: once all is off again, are the bits those of before?
    """
    drawn = {arm: _drawn(pipelines, beside, number, arm, preset) for arm in ARMS}
    again = _drawn(pipelines, beside, number, PLAIN, preset)
    seconds = {arm: one.seconds for arm, one in drawn.items()} | {PLAIN: (drawn[PLAIN].seconds + again.seconds) / 2}
    pictures = {arm: one.picture for arm, one in drawn.items()}
    both = (OURS_FIRST, THEIRS_FIRST)
    return {
        "seconds": {arm: round(spent, 4) for arm, spent in seconds.items()},
        "rms": {arm: _rms(picture, pictures[PLAIN]) for arm, picture in pictures.items()},
        "from_alone": {arm: _rms(pictures[arm], pictures[ALONE]) for arm in both},
        "orders_are_equal": bool(np.array_equal(*(pictures[arm] for arm in both))),
        "off_is_exact": bool(np.array_equal(again.picture, pictures[PLAIN])),
        "told": {arm: drawn[arm].told for arm in (MERGED, *both)},
    }


def _drawn(pipelines: Any, beside: Beside, number: int, arm: str, preset: str) -> Drawn:
    with_other = arm in (ALONE, OURS_FIRST, THEIRS_FIRST)
    pipe = pipelines.make(beside.pipeline, **beside.made_with) if with_other else pipelines.make()
    told: dict[str, Any] = {}
    merging = nullcontext() if arm in (PLAIN, ALONE) else _merging(pipe, preset, told)
    other = beside.put_on(pipe) if with_other else nullcontext()
    with CallTimes(pipe.unet) as times, ExitStack() as stack:
        for context in (other, merging) if arm == THEIRS_FIRST else (merging, other):
            stack.enter_context(context)
        picture = pipelines.draw(pipe, number, **(beside.call if with_other else {}))
    return Drawn(picture, sum(times.seconds), told)


@contextmanager
def _merging(pipe: Any, preset: str, told: dict[str, Any]) -> Iterator[None]:
    """told: filled with what the report says in the end."""
    with tome_core.patch(pipe, preset) as handle:
        yield
        report = handle.report()
        told["unet_calls"] = report.calls
        told["merged"] = sum(level.calls_merged for level in report.levels)
        told["skipped"] = [[level.level, reason, calls] for level in report.levels
                           for reason, calls in level.reasons.items()]  # fmt: skip


def _rms(a: np.ndarray, b: np.ndarray) -> float:
    """Root of the mean squared difference."""
    return float(f"{np.sqrt(np.mean((a.astype(np.float64) - b.astype(np.float64)) ** 2)):.6g}")
