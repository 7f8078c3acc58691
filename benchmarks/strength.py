"""The curve of strength from measured results: ``python -m benchmarks.strength RESULT.json...``.

docs/methods.md, "Strength", explains how a knot is chosen. The results are those of ``python -m benchmarks.quality
--for choose``. The command prints the knots, and in the last line the curve as `CURVES` of
``tome_core/settings/presets.py`` has it.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import numpy as np

from benchmarks import report, results, subjects
from benchmarks.quality import TIMES
from benchmarks.quality_report import sections
from benchmarks.variants import FRONT
from tome_core.settings.presets import EARLY_SHARE, MOST_MERGED, PARTS

KNOTS = 20  # of the curve, equally far apart
# strength -> the share of the attention work that it leaves; between two strengths its logarithm is a line
WORK = {0.25: 0.2, 0.5: 1 / 16, 0.75: 1 / 32, 1.0: 1 / 64}
# the time of matching, merging and correcting in a merged step, as a share of the unmerged attention's time: modelled
# from the kernels, SD1.5 at 1024 px, .13 on a 3060, .27 on a 4090, .31 on an H200
MERGING = 0.2
FEWEST = EARLY_SHARE  # late steps keep at least this share too
_NOTHING = 1e-9  # in place of 0, which has no logarithm
_MOMENTS = tuple(range(5, 1000, 10))  # a deviation is a mean over these timesteps

# the deviation by merging, in % of the v-loss: share of keys that is left -> deviation at each of `TIMES`
Loss = dict[float, tuple[float, ...]]


class Knot(NamedTuple):
    """A point of the curve: with `strength`, steps below timestep `until` keep `share` of the keys, and others
    `FEWEST`; `dev` is the expected error in % of the v-loss, a mean over all timesteps.
    """

    strength: float
    share: float
    until: float
    dev: float


def deviation_by_share(records: Sequence[dict]) -> Loss:
    """Map each share of keys that is left, largest first, to its mean deviations over all checkpoints at `TIMES`, in %.

    Of settings with equal work the best one counts, and a setting that does as much harm as another with less work is
    left out. Raises ValueError if no setting was measured by all checkpoints at all times.
    """
    best: dict[float, tuple[float, ...]] = {}
    for ratio, cell in FRONT:
        dev = read_means(records, ratio, cell)
        if dev and (ratio not in best or fmean(dev) < fmean(best[ratio])):
            best[ratio] = dev
    if not best:
        raise ValueError("not every result has rows of merged keys at all times; run python -m benchmarks.quality "
                         "first")
    mean = {ratio: fmean(dev) for ratio, dev in best.items()}
    return {1 - ratio: dev for ratio, dev in best.items()
            if not any(other > ratio and mean[other] <= mean[ratio] for other in best)}  # fmt: skip


def read_means(records: Sequence[dict], ratio: float, cell: int) -> tuple[float, ...]:
    """Average a setting's deviation, in %, at each of `TIMES` over all checkpoints; () if a checkpoint lacks it.

    ratio, cell: one pair of `FRONT`. A mean is at least `_NOTHING`.
    """
    figures = [section.noised.get(f"merged-keys-{ratio}-cells-{cell}")
               for record in records for section in sections(record)]  # fmt: skip
    if not figures or not all(noised is not None and len(noised.dev_at) == len(TIMES) for noised in figures):
        return ()  # else two rows could differ by their models, and not by their merging
    by_time = zip(*(noised.dev_at for noised in figures), strict=True)
    return tuple(max(fmean(mean.value for mean in means), _NOTHING) for means in by_time)


def time_at(strength: float) -> float:
    """Return the finest attention's time (1: unmerged) at a strength in 0..1.

    It is `WORK`, interpolated by logarithms, plus `MERGING`. Below the weakest strength in `WORK`, the logarithm of
    this sum is a line from 0 at strength 0.
    """
    weakest = min(WORK)
    if strength < weakest:  # the logarithm of the time is a line
        return (WORK[weakest] + MERGING) ** (strength / weakest)
    return math.exp(np.interp(strength, [*WORK], np.log([*WORK.values()]))) + MERGING


def step_time(share: float) -> float:
    """Compute a step's share of the unmerged attention's time: 1 for all keys, else its keys' share plus `MERGING`."""
    return 1.0 if share == 1 else share + MERGING


def curve(loss: Loss) -> tuple[Knot, ...]:
    """Choose the knots of strengths 0, 1 / `KNOTS`, ..., 1. Raises ValueError if nothing measured is fast enough.

    Of all curves on which a stronger knot never merges less in any step, the best has the least sum of deviations, each
    as a share of the least that the strength's time (`time_at`) allows. loss: the result of `deviation_by_share`.
    """
    ways = [(0.0, (Knot(0.0, 1.0, 1000.0, 0.0),))]  # the cost of each, and its knots
    for number in range(1, KNOTS + 1):
        strength = number / KNOTS
        pairs = _pairs(strength, loss)
        if not pairs:
            raise ValueError(f"nothing was measured that leaves {time_at(strength):.3g} of the time at {strength}")
        least = min(knot.dev for knot in pairs)
        longer = []
        for knot in pairs:
            before = [(cost, knots) for cost, knots in ways if knot.share <= knots[-1].share
                      and knot.until <= knots[-1].until]  # fmt: skip
            if before:
                cost, knots = min(before)
                longer.append((cost + knot.dev / least, (*knots, knot)))
        ways = longer
    return min(ways)[1]


def _pairs(strength: float, loss: Loss) -> list[Knot]:
    """List knots, at most one for each share of keys, with the `until` that leaves a strength's time (`time_at`)."""
    late_part = time_at(strength) - step_time(FEWEST)
    pairs = []
    for part in (*range(1, int(PARTS * MOST_MERGED) + 1), PARTS):
        share = part / PARTS
        if (late_part < _NOTHING) != (share == FEWEST):  # the strongest keeps the fewest keys in all steps
            continue
        until = round(1000 * late_part / (step_time(share) - step_time(FEWEST))) if share > FEWEST else 0
        if until <= 1000:
            pairs.append(Knot(strength, share, until, deviation(share, until, loss)))
    return pairs


def deviation(share: float, until: float, loss: Loss) -> float:
    """Average the deviation, in %, over timesteps: those below `until` keep `share` of the keys, others `FEWEST`."""
    both = zip(_MOMENTS, _deviation_by_time(share, loss), _deviation_by_time(FEWEST, loss), strict=True)
    return fmean([late if moment < until else early for moment, late, early in both])


def _deviation_by_time(share: float, loss: Loss) -> list[float]:
    """Interpolate the deviation, in %, at each of `_MOMENTS` if this share of the keys is left.

    Between measured shares and times the logarithm of the deviation is a line, over the share's logarithm and over
    time. With less merging than any measured, the deviation falls with the square of the merged share, as in pairs.
    """
    shares = sorted(loss)
    by_time = np.log([loss[measured] for measured in shares]).T
    at_times = [np.interp(math.log(share), np.log(shares), losses) for losses in by_time]
    if share >= shares[-1]:
        part = ((1 - share) / (1 - shares[-1])) ** 2
        at_times = np.log([max(value * part, _NOTHING) for value in loss[shares[-1]]])
    return np.exp(np.interp(_MOMENTS, TIMES, at_times)).tolist()


def _choose(options: argparse.Namespace, command: str) -> None:
    """Print knots and curve of `options.results`; `command` is unused. ResultError: a result is not to choose by."""
    records = [results.load(path) for path in options.results]
    for path, record in zip(options.results, records, strict=True):
        subjects.check_purpose(record, subjects.CHOOSE, path.name)
    knots = curve(deviation_by_share(records))
    for knot in knots:
        print(f"{knot.strength:.2f}: share {knot.share}, until {knot.until:.1f}, deviation {knot.dev:.3f}")
    print(", ".join(f"({round(knot.share * PARTS)}, {knot.until:.0f})" for knot in knots))


def main(arguments: list[str] | None = None) -> int:
    """Print the curve of a benchmark's results; return 0, 2 after an expected error, 130 if stopped.

    arguments: paths of one or more result files; None: ``sys.argv[1:]``. Wrong ones raise SystemExit.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.strength", description=__doc__.splitlines()[0])
    parser.add_argument("results", nargs="+", type=Path, metavar="RESULT.json")
    return report.run("strength", parser, arguments, _choose)


if __name__ == "__main__":
    sys.exit(main())
