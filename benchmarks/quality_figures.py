"""From the rows of a quality result to its figures: means over pictures, with the standard errors of paired means."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from benchmarks.picture_metrics import psnr
from benchmarks.results import Record
from benchmarks.variant_list import PLAIN

ROLES = ("tomesd", "method", "control", "yardstick")


class Mean(NamedTuple):
    """A mean over pictures and its standard error; None where one picture has none."""

    value: float
    error: float | None

    @classmethod
    def of(cls, values: np.ndarray) -> Mean:
        """Of one value a picture."""
        count = len(values)
        spread = float(np.std(values, ddof=1)) / math.sqrt(count) if count > 1 and np.isfinite(values).all() else None
        return cls(float(np.mean(values)), spread)


class Noised(NamedTuple):
    """Per cent of the unmerged v-loss: gap (its rise) and dev (squared distance), over all times and at each."""

    work: float
    gap: Mean
    dev: Mean
    gap_at: tuple[Mean, ...]
    dev_at: tuple[Mean, ...]


class Pictures(NamedTuple):
    """Whole pictures beside the unmerged ones: PSNR in dB, SSIM, and LPIPS where it was measured."""

    work: float
    psnr: Mean
    ssim: Mean
    lpips: Mean | None


class Section(NamedTuple):
    """All figures of one checkpoint. variants: as the result describes them, by name, in its order."""

    checkpoint: str
    loss: float | None
    counts: dict[str, int]
    variants: dict[str, dict[str, Any]]
    noised: dict[str, Noised]
    pictures: dict[str, Pictures]


def sections(record: Record) -> list[Section]:
    """One section for each checkpoint of a result, finished or not."""
    return [_section(record, checkpoint) for checkpoint in record["settings"]["models"]]


def _section(record: Record, checkpoint: str) -> Section:
    rows = [row for row in record["rows"] if row["checkpoint"] == checkpoint]
    parts: dict[str, dict[str, dict[int, dict]]] = {"noised": {}, "pictures": {}}
    for row in rows:
        parts[row["measure"]].setdefault(row["variant"], {})[row["part"]] = row
    plain = parts["noised"].get(PLAIN, {})
    loss = float(np.mean(_by_time(plain, "loss"))) if plain else None
    names = [name for name in (one["name"] for one in record["settings"]["variants"]) if name != PLAIN]
    noised = {name: _noised(parts["noised"][name], plain, loss) for name in names if name in parts["noised"]}
    pictures = {name: _pictures(parts["pictures"][name]) for name in names if name in parts["pictures"]}
    pictured = sum(len(row["ssim"]) for row in parts["pictures"].get(PLAIN, {}).values())
    counts = {"noised": _by_time(plain, "loss").shape[1] if plain else 0, "pictures": pictured}
    described = {one["name"]: one for one in record["settings"]["variants"]}
    return Section(checkpoint, loss, counts, described, noised, pictures)


def _by_time(parts: dict[int, dict], name: str) -> np.ndarray:
    """``[times, pictures]`` over all parts that are there."""
    return np.concatenate([np.array(parts[part][name]) for part in sorted(parts)], 1)


def _noised(parts: dict[int, dict], plain: dict[int, dict], loss: float) -> Noised:
    scale = 100 / loss
    dev = scale * _by_time(parts, "dev")
    gap = scale * (_by_time(parts, "loss") - _by_time({part: plain[part] for part in parts}, "loss"))
    work = float(np.mean([row["work"] for row in parts.values()]))
    by_time = (tuple(Mean.of(at) for at in values) for values in (gap, dev))
    return Noised(work, Mean.of(gap.mean(0)), Mean.of(dev.mean(0)), *by_time)


def _pictures(parts: dict[int, dict]) -> Pictures:
    def over(name: str) -> np.ndarray:
        return np.array([value for part in sorted(parts) for value in parts[part][name]])

    work = float(np.average([row["work"] for row in parts.values()], weights=[len(r["ssim"]) for r in parts.values()]))
    decibels = np.array([psnr(error) for error in over("squared_error")])
    measured = all("lpips" in row for row in parts.values())
    return Pictures(work, Mean.of(decibels), Mean.of(over("ssim")), Mean.of(over("lpips")) if measured else None)
