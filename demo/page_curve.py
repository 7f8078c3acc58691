"""What the benchmark measured of each strength with the embedded model: the time that it saves, and its error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tome_core.settings.presets import MARKS

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results"


class Point(NamedTuple):
    """strength: 0..1, None for settings made by hand. saved: share of the time, below 0 where it took longer.

    error: root of the mean squared difference from the unmerged picture, in steps of 255.
    """

    strength: float | None
    saved: float
    error: float


def read_measured(folder: Path = RESULTS) -> tuple[Point, ...]:
    """The newest quality result in the folder, from strength 0 up; empty where there is none."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("quality-*.json")]
    if not found:
        return ()
    result = max(found, key=lambda one: one["created"])
    model = next(iter(result["settings"]["models"]))
    strengths = {one["name"]: MARKS.get(one["setting"]) or float(one["setting"])
                 for one in result["settings"]["variants"] if one["method"] in ("preset", "strength")}  # fmt: skip
    rows: dict[float, list[dict]] = {}
    for row in result["rows"]:
        if row["checkpoint"] == model and row["measure"] == "pictures" and row["variant"] in strengths:
            rows.setdefault(strengths[row["variant"]], []).append(row)
    return (Point(0.0, 0.0, 0.0), *(_point(strength, rows[strength]) for strength in sorted(rows)))


def _point(strength: float, rows: list[dict]) -> Point:
    """Of a strength's rows: the time of calls as a share of unmerged ones', and the error, both over all pictures."""
    shares = np.concatenate([np.array(row["seconds"]) / np.array(row["beside"])[:, None] for row in rows])
    errors = np.concatenate([row["squared_error"] for row in rows])
    return Point(strength, 1 - float(np.median(shares, 0).mean()), float(np.sqrt(errors.mean())))


def between(curve: tuple[Point, ...], strength: float) -> Point:
    """The curve's point at a strength, on the line between its neighbours."""
    strengths, *rest = zip(*curve, strict=True)
    return Point(strength, *(float(np.interp(strength, strengths, values)) for values in rest))
