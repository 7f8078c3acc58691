"""The tables of ``python -m benchmarks.own_error``: how well the engine's estimates tell the errors of whole pictures,
and what shares that follow them gain at equal work.

An estimate of a picture is a mean over its steps of what the engine told: errors of attention by their level's share of
the model's attentions, those of blocks by the weight that a strength's two `max_error` give them. What merging would do
without its correction is not measured, so no estimate is compared with that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby, product
from operator import itemgetter
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

import tome_core
from benchmarks.own_error import ALONE, ATTENTION, BOUNDED, CURVE, USUAL
from benchmarks.report import ABSENT, markdown, number
from benchmarks.results import Record
from tome_core.engine.own_error import allowed
from tome_core.settings.presets import DEFAULT, SDXL

Row = dict[str, Any]
_ATTENTION, _BLOCKS = tome_core.preset(DEFAULT, SDXL).rules
KEEP = _ATTENTION.keep  # for so many timesteps a match serves
OF_BLOCKS = _ATTENTION.max_error / _BLOCKS.max_error  # the weight of a block's error beside attention's
_LEAST = 1e-9  # an estimate below it counts as this
_POWERS = np.arange(0, 2.01, 0.25)  # the grids of `Fit`
_WEIGHTS = (0.0, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3)
SETTING = ("model", "steps", "sampler", "guidance", "amount")  # what the rows of a way agree in but for the picture
LEGEND = f"""Rank is Spearman's rank correlation with the picture's squared error, decades the standard deviation of the
error's decimal logarithm around a line over the estimate's. Rows are pictures merged by the curve alone; means are over
the pictures of a model, setting and strength; single pictures are rows less the means of logarithms over such pictures.
"Fitted to other models" tries what was fitted to half of the models on the others, without another line. A block's
error counts {OF_BLOCKS:.3g} of attention's unless a weight is fitted. Allowed is what UNets are, in all models."""


# --- estimates of a picture -------------------------------------------------------------------------------------------


def in_force(row: Row) -> Iterator[tuple[float, dict[tuple[str, int], tuple[float, float]]]]:
    """Yield each step's timestep and, by part and level, the share and the error of the match that served there."""
    told = sorted(row["errors"], key=lambda error: -error[2])  # later ones replace earlier ones
    for now in row["timesteps"]:
        yield now, {(part, level): (share, error) for part, level, then, share, error in told
                    if -0.1 <= then - now <= KEEP}  # fmt: skip


def estimate(row: Row, power: float = 0.0, of_blocks: float = OF_BLOCKS) -> float:
    """Return a picture's estimate: a mean over its steps of errors by ``allowed ** -power`` and by part."""
    return max(_LEAST, fmean(
        sum(error * allowed(part, now) ** -power * (row["weights"][level] if part == "attn" else of_blocks)
            for (part, level), (_, error) in served.items())
        for now, served in in_force(row)))  # fmt: skip


def share_kept(row: Row) -> float:
    """Return the mean share of keys that attention kept, over steps and the model's attentions."""
    return fmean(sum(weight * served.get(("attn", level), (1.0, 0.0))[0] for level, weight in enumerate(row["weights"]))
                 for _, served in in_force(row))  # fmt: skip


ESTIMATES: dict[str, Callable[[Row], float]] = {
    "a constant": lambda row: 0.0,
    "share of keys kept": lambda row: -math.log10(share_kept(row)),
    "work saved": lambda row: row["work_saved"],
    "errors, sum over steps": lambda row: math.log10(estimate(row) * len(row["timesteps"])),
    "errors, mean over steps": lambda row: math.log10(estimate(row)),
    "errors / allowed": lambda row: math.log10(estimate(row, 1.0)),
    "errors / square root of allowed": lambda row: math.log10(estimate(row, 0.5)),
}


def measured(row: Row) -> float:
    """Return the decimal logarithm of a picture's squared error."""
    return math.log10(row["squared_error"])


class Fit(NamedTuple):
    """Weights by which errors count, and the line from there to the logarithm of a picture's squared error."""

    power: float  # of `allowed`
    of_blocks: float  # the lowest that fits as well as any: 0 if no block merged
    line: tuple[float, float, float]  # constant, slope over the estimate, and over the number of steps; logarithms

    @classmethod
    def to(cls, rows: list[Row]) -> Fit:
        """Find the fit with the least squares, by a grid of `power` and `of_blocks`."""
        errors = np.array([measured(row) for row in rows])
        best: tuple[float, Fit | None] = (math.inf, None)
        for power, of_blocks in product(_POWERS, _WEIGHTS):
            given = np.array([_logarithms(row, power, of_blocks) for row in rows])
            line = np.linalg.lstsq(given, errors, rcond=None)[0]
            left = float(np.square(errors - given @ line).sum())
            if left < best[0] * (1 - 1e-9):
                best = left, cls(float(power), of_blocks, tuple(map(float, line)))
        return best[1]

    def __call__(self, row: Row) -> float:
        """Return the logarithm of the squared error that is expected of a row."""
        return float(np.dot(self.line, _logarithms(row, self.power, self.of_blocks)))


def _logarithms(row: Row, power: float, of_blocks: float) -> tuple[float, float, float]:
    return 1.0, math.log10(estimate(row, power, of_blocks)), math.log10(len(row["timesteps"]))


def halves(rows: list[Row]) -> list[tuple[list[str], list[str]]]:
    """Return two pairs: the names of every other model, and of the rest; none if there are not two models."""
    names = sorted({row["model"] for row in rows})
    return [(names[::2], names[1::2]), (names[1::2], names[::2])] if len(names) > 1 else []


def fits(rows: list[Row]) -> dict[tuple[str, ...], Fit]:
    """Return by the names of half of the models what was fitted to the others."""
    return {tuple(tried): Fit.to([row for row in rows if row["model"] in fitted]) for fitted, tried in halves(rows)}


# --- how well an estimate tells ---------------------------------------------------------------------------------------


def rank_correlation(first: Iterable[float], second: Iterable[float]) -> float | None:
    """Return Spearman's rank correlation; equal values share their mean rank. None if one has equal values only."""
    ranks = []
    for values in (first, second):
        _, places, counts = np.unique(np.array(list(values)), return_inverse=True, return_counts=True)
        ranks.append((np.cumsum(counts) - (counts - 1) / 2)[places])
    return None if min(np.ptp(one) for one in ranks) == 0 else float(np.corrcoef(*ranks)[0, 1])


def decades(estimates: Iterable[float], errors: Iterable[float], has_line: bool = False) -> float:
    """Return the root mean square of errors around a line over estimates; has_line: around the estimates themselves."""
    x, y = np.array(list(estimates)), np.array(list(errors))
    if not has_line:
        line = np.stack([np.ones_like(x), x], 1)
        x = line @ np.linalg.lstsq(line, y, rcond=None)[0]
    return float(np.sqrt(np.square(y - x).mean()))


def predictions(records: list[Record]) -> str:
    """Make the Markdown table of `ESTIMATES`: rank correlation and decades over rows, means, and in each model."""
    rows = [row for row in _rows(records) if row["way"] == CURVE and row["squared_error"] > 0]
    models, fitted = sorted({row["model"] for row in rows}), fits(rows)
    ways = {name: (way, False) for name, way in ESTIMATES.items()}
    if fitted:
        by_model = {name: fit for names, fit in fitted.items() for name in names}
        ways["errors, fitted to other models"] = (lambda row: by_model[row["model"]](row), True)
    lines = []
    for name, (way, has_line) in ways.items():
        pairs = [(way(row), measured(row)) for row in rows]
        means = [(fmean(way(row) for row in group), math.log10(fmean(row["squared_error"] for row in group)))
                 for group in _grouped(rows, *SETTING)]  # fmt: skip
        within = [[pair for pair, row in zip(pairs, rows, strict=True) if row["model"] == model] for model in models]
        lines.append((name, *(_cell(one, has_line) for one in (pairs, means, *within, beside_means(rows, way)))))
    return markdown(("rank, decades", "all rows", "means", *models, "single pictures"), lines, left=1)


def beside_means(rows: list[Row], way: Callable[[Row], float]) -> list[tuple[float, float]]:
    """Return pairs of an estimate's and an error's logarithms, less their means over the pictures of a setting."""
    pairs = []
    for group in _grouped(rows, *SETTING):
        both = np.array([(way(row), measured(row)) for row in group])
        pairs += [(float(first), float(second)) for first, second in (both - both.mean(0)).round(9)]
    return pairs


def _cell(pairs: list[tuple[float, float]], has_line: bool) -> str:
    estimates, errors = zip(*pairs, strict=True)
    return f"{number(rank_correlation(estimates, errors), '.2f')}, {decades(estimates, errors, has_line):.2f}"


def fitted_table(records: list[Record]) -> str:
    """Make the Markdown table of what was fitted to each half of the models, and tried on the other."""
    rows = [row for row in _rows(records) if row["way"] == CURVE and row["squared_error"] > 0]
    lines = []
    for tried, fit in fits(rows).items():
        by_half = [[row for row in rows if (row["model"] in tried) is on_them] for on_them in (False, True)]
        spread = [f"{decades(map(fit, half), map(measured, half), True):.2f}" for half in by_half]
        names = (", ".join(sorted({row["model"] for row in half})) for half in by_half)
        lines.append((*names, f"{fit.power:.2f}", f"{fit.of_blocks:g}", *(f"{one:.2f}" for one in fit.line[1:]),
                      *spread))  # fmt: skip
    return markdown(("fitted to", "tried on", "power of 1 / allowed", "weight of blocks", "slope", "power of steps",
                     "decades, fitted", "decades, tried"), lines, left=2)  # fmt: skip


# --- equal work -------------------------------------------------------------------------------------------------------


class Case(NamedTuple):
    """Means over a model's pictures in one way. of_curve: the curve's PSNR at this work; None outside of its works.

    Shares by error alone merge no blocks, so they are beside a curve that merges none.
    """

    model: str
    steps: int
    way: str
    amount: float
    work: float
    psnr: float
    of_curve: float | None

    @property
    def gain(self) -> float | None:
        """By how many dB it is better than the curve at equal work."""
        return None if self.of_curve is None or math.isinf(self.psnr) else self.psnr - self.of_curve


def decibels(squared_error: float) -> float:
    """Return a mean squared error of numbers from 0 to 1 as a PSNR in dB; infinity for 0."""
    return -10 * math.log10(squared_error) if squared_error else math.inf


def at_equal_work(rows: list[Row]) -> Iterator[Case]:
    """Yield the curve's cases, and the others' beside it, in the demo's sampler at usual guidance."""
    usual = [row for row in rows if (row["sampler"], row["guidance"]) == USUAL[1:]]
    for group in _grouped(usual, "model", "steps"):
        means = {}
        for of in _grouped(group, "way", "amount"):
            means[of[0]["way"], of[0]["amount"]] = (fmean(row["work_saved"] for row in of),
                                                    decibels(fmean(row["squared_error"] for row in of)))  # fmt: skip
        lines = {of: sorted(mean for (way, _), mean in means.items() if way == of) for of in (CURVE, ATTENTION)}
        for (way, amount), (work, psnr) in means.items():
            line = lines[ATTENTION] if way == ALONE and lines[ATTENTION] else lines[CURVE]
            inside = line and line[0][0] <= work <= line[-1][0]
            of_curve = float(np.interp(work, *zip(*line, strict=True))) if inside else None
            yield Case(group[0]["model"], group[0]["steps"], way, amount, work, psnr, of_curve)


def equal_work(records: list[Record]) -> str:
    """Make the Markdown table of all cases of `at_equal_work`."""
    lines = [(case.model, str(case.steps), f"{case.way} {case.amount:g}", f"{case.work:.1%}", f"{case.psnr:.1f}",
              *((ABSENT, ABSENT) if case.way == CURVE else
                (number(case.of_curve, ".1f"), number(case.gain, "+.1f"))))
             for case in at_equal_work(_rows(records))]  # fmt: skip
    heads = ("model", "steps", "way", "less work", "PSNR dB", "PSNR of the curve there", "better by dB")
    return markdown(heads, lines, left=3)


def by_model(records: list[Record]) -> str:
    """Make the Markdown table of models: `balanced` in 8 steps by the curve and bounded, how far pictures of a setting
    and their estimates are apart, and gains at equal work over all strengths and steps: means, least and most.
    """
    rows, lines = _rows(records), []
    cases = list(at_equal_work(rows))
    for group in _grouped(rows, "model"):
        model = group[0]["model"]
        curve = [row for row in group if row["way"] == CURVE]
        balanced = [row for row in curve if row["amount"] == 0.5
                    and (row["steps"], row["sampler"], row["guidance"]) == USUAL]  # fmt: skip
        apart = [np.ptp([decibels(row["squared_error"]) for row in of]) for of in _grouped(curve, *SETTING)]
        spread = [max(told) / min(told) for of in _grouped(curve, *SETTING) if (told := [*map(estimate, of)])]
        of = {way: [case for case in cases if (case.model, case.way) == (model, way)]
              for way in (CURVE, BOUNDED, ALONE)}  # fmt: skip
        usual = (next((f"{case.work:.0%}, {case.psnr:.1f}" for case in of[way]
                       if (case.steps, case.amount) == (USUAL.steps, 0.5)), ABSENT)
                 for way in (CURVE, BOUNDED))  # fmt: skip
        known = [case.gain for case in of[BOUNDED] if case.gain is not None]
        lines.append((model, f"{fmean(map(estimate, balanced)):.0e}" if balanced else ABSENT, *usual,
                      f"{fmean(apart):.1f}, {max(apart):.1f}" if apart else ABSENT,
                      f"{fmean(spread):.1f}, {max(spread):.1f}" if spread else ABSENT,
                      f"{fmean(known):+.1f} ({min(known):+.1f} to {max(known):+.1f})" if known else ABSENT,
                      ", ".join(number(case.gain, "+.1f") for case in of[ALONE]) or ABSENT))  # fmt: skip
    heads = ("model", "estimate at 0.5", "curve at 0.5: less work, PSNR dB", "bounded",
             "pictures apart: mean, most, dB", "their estimates: mean, most, times", "bounded better by dB",
             "by error alone better by dB")  # fmt: skip
    return markdown(heads, lines, left=1)


# --- all --------------------------------------------------------------------------------------------------------------


def _rows(records: list[Record]) -> list[Row]:
    return [row for record in records for row in record["rows"]]


def _grouped(rows: list[Row], *names: str) -> Iterator[list[Row]]:
    """Yield the rows that agree in these figures, group by group."""
    key = itemgetter(*names)
    return (list(group) for _, group in groupby(sorted(rows, key=key), key))


def table(records: list[Record]) -> str:
    """Make the Markdown of results, of all together: their origin, how well estimates tell, and equal work."""
    origin = "\n".join(f"`{record['command']}`, {record['created'][:10]}, commit {record.get('commit')}."
                       + (f" **Unfinished: {len(record['missing'])} rows are missing.**" if record["missing"] else "")
                       for record in records)  # fmt: skip
    return "\n\n".join([origin, LEGEND, predictions(records), fitted_table(records), by_model(records),
                        equal_work(records)])  # fmt: skip
