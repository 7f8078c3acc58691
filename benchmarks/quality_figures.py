"""From the rows of a quality result to its figures: means over pictures, with the standard errors of paired means.

And others beside strength at equal time: what strength gives in the time that another method takes. Of the presets and
strengths of a result those count which no other one beats in both, time and PSNR; between two of them a line is drawn
over time, for deviations of their logarithms.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from benchmarks.results import Record
from benchmarks.variant_list import PLAIN
from demo.metrics import decibels

_NO_DETAIL = 1e-6  # the energy of a picture without any, in squared steps of 255
ROLES = ("tomesd", "method", "control", "yardstick")
OURS = ("preset", "strength")


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


class NoiseMeans(NamedTuple):
    """Per cent of the unmerged v-loss: gap (its rise) and dev (squared distance), over all times and at each."""

    work: float
    gap: Mean
    dev: Mean
    gap_at: tuple[Mean, ...]
    dev_at: tuple[Mean, ...]


class PictureMeans(NamedTuple):
    """Whole pictures beside the unmerged ones: PSNR in dB, SSIM, and what only some results have.

    detail: gradient energy as a share of the unmerged picture's, the geometric mean. time: of all calls of a picture,
    as a share of the unmerged ones; dearest: of the step that takes longest, as a rule one that matches.
    """

    work: float
    psnr: Mean
    ssim: Mean
    detail: Mean | None = None
    time: float | None = None
    dearest: float | None = None


class Section(NamedTuple):
    """All figures of one checkpoint. variants: as the result describes them, by name, in its order."""

    checkpoint: str
    loss: float | None
    counts: dict[str, int]
    variants: dict[str, dict[str, Any]]
    noised: dict[str, NoiseMeans]
    pictures: dict[str, PictureMeans]


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
    noised = {name: _average_noised(parts["noised"][name], plain, loss) for name in names if name in parts["noised"]}
    whole = parts["pictures"]
    pictures = {name: _pictures(whole[name], whole[PLAIN]) for name in names if name in whole}
    pictured = sum(len(row["ssim"]) for row in whole.get(PLAIN, {}).values())
    counts = {"noised": _by_time(plain, "loss").shape[1] if plain else 0, "pictures": pictured}
    described = {one["name"]: one for one in record["settings"]["variants"]}
    return Section(checkpoint, loss, counts, described, noised, pictures)


def _by_time(parts: dict[int, dict], name: str) -> np.ndarray:
    """``[times, pictures]`` over all parts that are there."""
    return np.concatenate([np.array(parts[part][name]) for part in sorted(parts)], 1)


def _average_noised(parts: dict[int, dict], plain: dict[int, dict], loss: float) -> NoiseMeans:
    scale = 100 / loss
    dev = scale * _by_time(parts, "dev")
    gap = scale * (_by_time(parts, "loss") - _by_time({part: plain[part] for part in parts}, "loss"))
    work = float(np.mean([row["work"] for row in parts.values()]))
    by_time = (tuple(Mean.of(at) for at in values) for values in (gap, dev))
    return NoiseMeans(work, Mean.of(gap.mean(0)), Mean.of(dev.mean(0)), *by_time)


def _pictures(parts: dict[int, dict], plain: dict[int, dict]) -> PictureMeans:
    def over(name: str, rows: dict[int, dict] = parts) -> np.ndarray:
        return np.array([value for part in sorted(parts) for value in rows[part][name]])

    def all_have(name: str) -> bool:
        return all(name in row for row in parts.values())

    work = float(np.average([row["work"] for row in parts.values()], weights=[len(r["ssim"]) for r in parts.values()]))
    ratios = np.array([decibels(error) for error in over("squared_error")])
    detail = _detail(over("gradient"), over("gradient", plain)) if all_have("gradient") else None
    times = _times(over("seconds"), over("beside"), over("seconds", plain)) if all_have("seconds") else (None, None)
    return PictureMeans(work, Mean.of(ratios), Mean.of(over("ssim")), detail, *times)


def _detail(energies: np.ndarray, unmerged: np.ndarray) -> Mean:
    logs = Mean.of(np.log(np.maximum(energies, _NO_DETAIL) / np.maximum(unmerged, _NO_DETAIL)))
    share = math.exp(logs.value)
    return Mean(share, None if logs.error is None else share * logs.error)


def _times(seconds: np.ndarray, beside: np.ndarray, unmerged: np.ndarray) -> tuple[float, float]:
    """Shares of the unmerged time: of all calls of a picture, and of its dearest step; medians over pictures."""
    steps = np.median(seconds / beside[:, None], 0)
    return float(steps.sum() / unmerged.shape[1]), float(steps.max())


class Point(NamedTuple):
    """What one setting takes and gives: time as a share of unmerged calls', PSNR in dB, SSIM, dev in % or None."""

    time: float
    psnr: float
    ssim: float
    dev: float | None


class Rival(NamedTuple):
    """Another method and strength at its time. ours: None where no strength measured is as fast."""

    name: str
    theirs: Point
    ours: Point | None


def at_equal_time(section: Section) -> Iterator[Rival]:
    """Every other method with whole pictures and their time, in the result's order; none without strengths."""
    timed = [name for name, one in section.pictures.items() if one.time is not None]
    ours = [name for name in timed if section.variants[name]["method"] in OURS]
    front = _front([_point(section, name) for name in ours])
    for name in timed:
        if front and section.variants[name]["role"] in ("method", "tomesd") and name not in ours:
            point = _point(section, name)
            yield Rival(name, point, front_at(front, point.time))


def front_at(front: list[Point], time: float) -> Point | None:
    """The front, by rising time, at this one; its slowest point where it need not be as slow."""
    if time < front[0].time:
        return None
    for low, high in pairwise(front):
        if time <= high.time:
            part = (time - low.time) / (high.time - low.time)
            return Point(time, *(_between(*pair, part) for pair in ((low.psnr, high.psnr), (low.ssim, high.ssim))),
                         _dev_between(low.dev, high.dev, part))  # fmt: skip
    return front[-1]


def _point(section: Section, name: str) -> Point:
    one, noised = section.pictures[name], section.noised.get(name)
    return Point(one.time, one.psnr.value, one.ssim.value, noised and noised.dev.value)


def _front(points: list[Point]) -> list[Point]:
    """By rising time, each with a higher PSNR than those before it."""
    found: list[Point] = []
    for point in sorted(points, key=lambda one: (one.time, -one.psnr)):
        if not found or point.psnr > found[-1].psnr:
            found.append(point)
    return found


def _between(low: float, high: float, part: float) -> float:
    return low * (1 - part) + high * part


def _dev_between(low: float | None, high: float | None, part: float) -> float | None:
    return math.exp(_between(math.log(low), math.log(high), part)) if low and high else None
