"""Others beside strength at equal time: what strength gives in the time that another method takes.

Of the presets and strengths of a result those count which no other one beats in both, time and PSNR; between two of
them a line is drawn over time, for deviations of their logarithms.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from benchmarks.quality_figures import Section

OURS = ("preset", "strength")


class Point(NamedTuple):
    """What one setting takes and gives: time as a share of unmerged calls', PSNR in dB, SSIM, dev in % or None."""

    time: float
    psnr: float
    ssim: float
    dev: float | None


class Beside(NamedTuple):
    """Another method and strength at its time. ours: None where no strength measured is as fast."""

    name: str
    theirs: Point
    ours: Point | None


def beside(section: Section) -> Iterator[Beside]:
    """Every other method with whole pictures and their time, in the result's order; none without strengths."""
    timed = [name for name, one in section.pictures.items() if one.time is not None]
    ours = [name for name in timed if section.variants[name]["method"] in OURS]
    front = _front([_point(section, name) for name in ours])
    for name in timed:
        if front and section.variants[name]["role"] in ("method", "tomesd") and name not in ours:
            point = _point(section, name)
            yield Beside(name, point, at(front, point.time))


def at(front: list[Point], time: float) -> Point | None:
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
