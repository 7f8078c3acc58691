"""What strength stands for: ``python -m benchmarks.strength RESULT.json...`` makes its curve from measured fronts.

How a knot is chosen is told in docs/methods.md, "Strength". Needs results of ``python -m benchmarks.quality --for
choose``; prints the knots, and in the last line the curve as `CURVES` of ``tome_core/settings/presets.py`` has it. With
``--compare`` the curve beside what the engine's own for Stable Diffusion's layout does to the results' models.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import numpy as np

from benchmarks import report, results, subjects
from benchmarks.quality_figures import sections
from benchmarks.quality_rows import TIMES
from benchmarks.variants import FRONT
from tome_core.settings.presets import CURVES, EARLY_SHARE, MOST_MERGED, PARTS, SD

# the results that the engine's curves are made from
SOURCES = {
    "sd": ["front-cpu-2026-11-22.json"],
    "sdxl": ["sdxl-front-cpu-2026-11-24.json"],
    "transformer": ["transformer-front-cpu-2026-11-23.json", "transformer-front-cpu-2026-11-24.json"],
}
KNOTS = 20  # of the curve, equally far apart
# share of the attention work left at a strength; between them its logarithm is a line
WORK = {0.25: 0.2, 0.5: 1 / 16, 0.75: 1 / 32, 1.0: 1 / 64}
# what a merged step takes for matching, merging and correcting, as a share of the unmerged attention's time: modelled
# from its kernels, SD1.5 at 1024 px, .13 on a 3060, .27 on a 4090, .31 on an H200
MERGING = 0.2
FEWEST = EARLY_SHARE  # which late steps keep at least
_NOTHING = 1e-9  # has a logarithm
_MOMENTS = tuple(range(5, 1000, 10))  # timesteps, over which a deviation is a mean


class Loss(NamedTuple):
    """What some merging costs, per cent of the v-loss: at each of `TIMES`, by the share that is left."""

    by_share: dict[float, tuple[float, ...]]

    def at(self, share: float) -> list[float]:
        """At each of `_MOMENTS`, where this share is left.

        Between what was measured its logarithm is a line over the share's, and over time; below the least merging
        that was measured it falls with the square of what is merged, as that of groups of two does.
        """
        shares = sorted(self.by_share)
        by_time = np.log([self.by_share[one] for one in shares]).T
        at_times = [np.interp(math.log(share), np.log(shares), one) for one in by_time]
        if share >= shares[-1]:
            part = ((1 - share) / (1 - shares[-1])) ** 2
            at_times = np.log([max(one * part, _NOTHING) for one in self.by_share[shares[-1]]])
        return np.exp(np.interp(_MOMENTS, TIMES, at_times)).tolist()


class Knot(NamedTuple):
    """One strength: the share of keys that steps before timestep ``until`` keep, and the deviation to be expected."""

    strength: float
    share: float
    until: float
    dev: float

    @property
    def work(self) -> float:
        """Share of the finest attention's products left."""
        return (self.share * self.until + FEWEST * (1000 - self.until)) / 1000


def front(records: Sequence[dict]) -> Loss:
    """Of keys and values merged at the finest level; of settings with equal work the best.

    A setting that does more harm than one with less work is left out.
    """
    found: dict[float, tuple[float, ...]] = {}
    for ratio, cell in FRONT:
        dev = read_means(records, ratio, cell)
        if dev and (ratio not in found or fmean(dev) < fmean(found[ratio])):
            found[ratio] = dev
    if not found:
        raise ValueError("not every result has rows of merged keys at all times; run python -m benchmarks.quality "
                         "first")
    mean = {ratio: fmean(dev) for ratio, dev in found.items()}
    return Loss({1 - ratio: dev for ratio, dev in found.items()
                 if not any(other > ratio and mean[other] <= mean[ratio] for other in found)})  # fmt: skip


def read_means(records: Sequence[dict], ratio: float, cell: int) -> tuple[float, ...]:
    """The mean deviation at each time over the checkpoints of all results; none where one is missing.

    Means over other models than those of the next row could not be told apart from what merging does.
    """
    found = [section.noised.get(f"merged-keys-{ratio}-cells-{cell}")
             for record in records for section in sections(record)]  # fmt: skip
    if not found or not all(one is not None and len(one.dev_at) == len(TIMES) for one in found):
        return ()
    by_time = zip(*(one.dev_at for one in found), strict=True)
    return tuple(max(fmean(mean.value for mean in means), _NOTHING) for means in by_time)


def time_at(strength: float) -> float:
    """The share of the finest attention's time that a strength leaves; its logarithm is a line up to the first mark."""
    weakest = min(WORK)
    if strength < weakest:
        return (WORK[weakest] + MERGING) ** (strength / weakest)
    return math.exp(np.interp(strength, [*WORK], np.log([*WORK.values()]))) + MERGING


def step_time(share: float) -> float:
    """What a step that keeps this share of the keys takes of the unmerged attention's time."""
    return 1.0 if share == 1 else share + MERGING


def curve(loss: Loss) -> tuple[Knot, ...]:
    """All knots, the weakest first.

    Of all ways through the knots on which no step is ever asked for less, the one whose deviations are the least, each
    as a share of the least that its time allows.
    """
    ways = [(0.0, (Knot(0.0, 1.0, 1000.0, 0.0),))]  # the cost of each, and its knots
    for number in range(1, KNOTS + 1):
        strength = number / KNOTS
        found = _pairs(strength, loss)
        if not found:
            raise ValueError(f"nothing was measured that leaves {time_at(strength):.3g} of the time at {strength}")
        least = min(knot.dev for knot in found)
        longer = []
        for knot in found:
            before = [(cost, knots) for cost, knots in ways if knot.share <= knots[-1].share
                      and knot.until <= knots[-1].until]  # fmt: skip
            if before:
                cost, knots = min(before)
                longer.append((cost + knot.dev / least, (*knots, knot)))
        ways = longer
    return min(ways)[1]


def _pairs(strength: float, loss: Loss) -> list[Knot]:
    """Every share of keys in late steps with the timestep that leaves this strength's time."""
    late_part = time_at(strength) - step_time(FEWEST)
    found = []
    for part in (*range(1, int(PARTS * MOST_MERGED) + 1), PARTS):
        share = part / PARTS
        if (late_part < _NOTHING) != (share == FEWEST):  # what keeps the fewest keys keeps them in all steps
            continue
        until = round(1000 * late_part / (step_time(share) - step_time(FEWEST))) if share > FEWEST else 0
        if until <= 1000:
            found.append(Knot(strength, share, until, deviation(share, until, loss)))
    return found


def deviation(share: float, until: float, loss: Loss) -> float:
    """Of steps that keep this share of the keys before timestep ``until`` and the fewest from there on."""
    pairs = zip(_MOMENTS, loss.at(share), loss.at(FEWEST), strict=True)
    return fmean([own if moment < until else few for moment, own, few in pairs])


def beside(loss: Loss, knots: Sequence[Knot], own: Sequence[tuple[int, int]]) -> str:
    """Markdown: a curve and another one of as many knots, with the deviations of both on these models."""
    def cells(knot: Knot) -> tuple[str, str, str]:
        return f"{knot.share:.4g}, {knot.until:.0f}", f"{knot.work:.3f}", f"{knot.dev:.3f}"

    rows = []
    for knot, (keys, until) in zip(knots, own, strict=True):
        share = keys / PARTS
        theirs = Knot(knot.strength, share, until, deviation(share, until, loss) if knot.strength else 0.0)
        rows.append((f"{knot.strength:.2f}", *cells(knot), *cells(theirs)))
    return report.markdown(("strength", "late share, until", "work", "dev %", "the engine's", "work", "dev %"), rows)


def _choose(options: argparse.Namespace, command: str) -> int:
    records = [results.load(path) for path in options.results]
    for path, record in zip(options.results, records, strict=True):
        subjects.check_purpose(record, subjects.CHOOSE, path.name)
    loss = front(records)
    knots = curve(loss)
    if options.compare:
        print(beside(loss, knots, CURVES[SD]))
        return 0
    for knot in knots:
        print(f"{knot.strength:.2f}: share {knot.share}, until {knot.until:.1f}, work {knot.work:.3f}, "
              f"deviation {knot.dev:.3f}")
    print(", ".join(f"({round(knot.share * PARTS)}, {knot.until:.0f})" for knot in knots))
    return 0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.strength", description=__doc__.splitlines()[0])
    parser.add_argument("results", nargs="+", type=Path, metavar="RESULT.json")
    parser.add_argument("--compare", action="store_true", help="print the curve beside the engine's own")
    return report.run("strength", parser, arguments, _choose)


if __name__ == "__main__":
    sys.exit(main())
