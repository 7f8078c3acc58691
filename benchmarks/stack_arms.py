"""One comparison: a picture without anything, with merging, with another method, and with both in both orders."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

PLAIN, MERGED, ALONE, OURS_FIRST, THEIRS_FIRST = ARMS = ("plain", "merged", "alone", "ours first", "theirs first")
WITH_MERGING, WITH_OTHER = (MERGED, OURS_FIRST, THEIRS_FIRST), (ALONE, OURS_FIRST, THEIRS_FIRST)


class Drawn(NamedTuple):
    """A picture, the processor seconds of drawing it, how often the UNet was computed, and what merging reported."""

    picture: np.ndarray
    seconds: float
    calls: int
    told: dict[str, Any]


def measure(draw: Callable[[str], Drawn]) -> dict[str, Any]:
    """A row. draw: gives what an arm gives.

    seconds: by arm, plain ones before and after; calls: of the UNet that were computed; rms: how far each is from the
    plain picture, in its own units; from_alone: how far those with both are from the one with the other alone; told:
    what merging reported; off_is_exact: once all is off again, are the bits those of before?
    """
    drawn = {arm: draw(arm) for arm in ARMS}
    again = draw(PLAIN)
    seconds = {arm: one.seconds for arm, one in drawn.items()} | {PLAIN: (drawn[PLAIN].seconds + again.seconds) / 2}
    pictures = {arm: one.picture for arm, one in drawn.items()}
    both = (OURS_FIRST, THEIRS_FIRST)
    return {
        "seconds": {arm: round(spent, 4) for arm, spent in seconds.items()},
        "calls": {arm: one.calls for arm, one in drawn.items()},
        "rms": {arm: _rms(picture, pictures[PLAIN]) for arm, picture in pictures.items()},
        "from_alone": {arm: _rms(pictures[arm], pictures[ALONE]) for arm in both},
        "orders_are_equal": bool(np.array_equal(*(pictures[arm] for arm in both))),
        "off_is_exact": bool(np.array_equal(again.picture, pictures[PLAIN])),
        "told": {arm: drawn[arm].told for arm in WITH_MERGING},
    }


def summarize(report: Any) -> dict[str, Any]:
    """What a row keeps of a `tome_core.Report`."""
    skipped = [[level.level, reason, calls] for level in report.levels for reason, calls in level.reasons.items()]
    return {"unet_calls": report.calls, "merged": sum(level.calls_merged for level in report.levels),
            "skipped": skipped}  # fmt: skip


def _rms(a: np.ndarray, b: np.ndarray) -> float:
    """Root of the mean squared difference."""
    return float(f"{np.sqrt(np.mean((a.astype(np.float64) - b.astype(np.float64)) ** 2)):.6g}")
