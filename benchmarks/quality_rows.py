"""The rows of a quality result: their plan, and how each is measured.

A row is one variant on one part of the pictures of one checkpoint, so that little is lost when a run is killed. The
rows of a part share pictures, noise, times and the seed of all draws.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.networks import UNET, Work
from benchmarks.subjects import PART_NOISED, Subject
from benchmarks.timing import CallTimes
from benchmarks.variants import PLAIN, VARIANTS, Variant
from demo.metrics import gradient_energy, squared_error, ssim

TIMES = (50, 200, 400, 600, 800, 950)
PART_PICTURES = {True: 4, False: 1}  # pictures in one row: of a scene model, and of a user's model, which is slow


@dataclass(frozen=True)
class Amounts:
    """The amounts that are measured of each variant and checkpoint."""

    noised: int  # pictures
    pictures: int  # whole ones
    steps: int  # of the solver
    times: tuple[int, ...] = TIMES  # of noised pictures
    clock: bool = False  # take the time of whole pictures' calls too


class Row(NamedTuple):
    """One row to measure: a variant on one part of a checkpoint's pictures."""

    checkpoint: str
    measure: str  # "noised" for predictions of noised pictures, "pictures" for whole ones
    part: int  # its number
    first: int  # its first picture
    count: int  # of its pictures
    variant: str

    @property
    def key(self) -> str:
        """The key in a result."""
        return f"{self.checkpoint}/{self.measure}/{self.part}/{self.variant}"

    @property
    def group(self) -> tuple[str, str, int]:
        """The fields that are equal in rows that are compared with the same unmerged result."""
        return self.checkpoint, self.measure, self.part


def rows(
    checkpoint: str, names: Sequence[str], amounts: Amounts, can_be_noised: bool, kind: str = UNET
) -> Iterator[Row]:
    """Plan all rows of a checkpoint, a part at a time, for those variants of `names` that fit this kind of network."""
    can = [name for name in names if kind in VARIANTS[name].kinds]
    for measure, total, size in (
        ("noised", amounts.noised if can_be_noised else 0, PART_NOISED),
        ("pictures", amounts.pictures, PART_PICTURES[can_be_noised]),
    ):
        for part, first in enumerate(range(0, total, size)):
            for name in can:
                if measure == "pictures" or VARIANTS[name].solver == 1:
                    yield Row(checkpoint, measure, part, first, min(size, total - first), name)


class Picture(NamedTuple):
    """A whole picture, the share of the attention work that was left, and the times of the network's calls."""

    pixels: np.ndarray  # uint8 ``[H, W, 3]``
    work: float
    seconds: list[float]  # of its calls
    unmerged: float | None  # seconds of an unmerged call


class QualityBench:
    """The measuring of rows on one checkpoint; it keeps the unmerged results of the latest group only."""

    def __init__(self, subject: Subject, amounts: Amounts) -> None:
        self.subject, self.amounts = subject, amounts
        self.work, self.times = Work(subject.network), CallTimes(subject.network)
        self._group, self._plain = (), []

    @torch.inference_mode()
    def measure(self, row: Row) -> dict[str, Any]:
        """Measure a row's figures: lists over pictures, for noised ones lists over times of such lists."""
        variant = VARIANTS[row.variant]
        make, compare = (self._predict, _predictions) if row.measure == "noised" else (self._draw, _pictures)
        if self._group != row.group:
            self._group, self._plain = row.group, make(row, VARIANTS[PLAIN])
        return compare(self._plain if variant.name == PLAIN else make(row, variant), self._plain)

    def _predict(self, row: Row, variant: Variant) -> list[tuple[torch.Tensor, list[float], float]]:
        """Return for each time the prediction, the loss of each picture, and the share of the attention work left."""
        predictions = []
        for time in self.amounts.times:
            noised = self.subject.add_noise(row.part, row.count, time)
            with self.work, variant.put_on(self.subject.network, self.subject.purpose.first + row.part):
                prediction = self.subject.predict(noised)
            predictions.append((prediction, _error(prediction, noised.velocity), self.work.share()))
        return predictions

    def _draw(self, row: Row, variant: Variant) -> list[Picture]:
        """Draw the row's pictures by a variant."""
        pictures = []
        for number in range(row.first, row.first + row.count):
            with self.times, self.work, variant.put_on(self.subject.network, self.subject.purpose.first + number):
                pixels = self.subject.picture(number, self.amounts.steps * variant.solver)
            unmerged = self.times.time_unmerged() if self.amounts.clock else None
            pictures.append(Picture(pixels, self.work.share(), self.times.seconds, unmerged))
        return pictures


def _predictions(merged: list, plain: list) -> dict[str, Any]:
    """Make a row's figures from what `QualityBench._predict` gave for its variant and without merging."""
    return {"work": _round(share for *_, share in merged),
            "loss": [_round(loss) for _, loss, _ in merged],
            "dev": [_round(_error(new, old)) for (new, *_), (old, *_) in zip(merged, plain, strict=True)]}


def _pictures(merged: list[Picture], plain: list[Picture]) -> dict[str, Any]:
    """Make a row's figures from its pictures and the same pictures without merging."""
    def of_pairs(measure: Callable[[np.ndarray, np.ndarray], float]) -> list[float]:
        return _round(measure(old.pixels, new.pixels) for new, old in zip(merged, plain, strict=True))

    figures = {"work": _round([np.mean([picture.work for picture in merged])])[0],
               "gradient": _round(gradient_energy(picture.pixels) for picture in merged),
               "squared_error": of_pairs(squared_error), "ssim": of_pairs(ssim)}  # fmt: skip
    if merged[0].unmerged is not None:
        figures |= {"seconds": [_round(picture.seconds) for picture in merged],
                    "beside": _round(picture.unmerged for picture in merged)}  # fmt: skip
    return figures


def _error(a: torch.Tensor, b: torch.Tensor) -> list[float]:
    """Compute the mean squared difference of each picture."""
    return (a - b).double().pow(2).flatten(1).mean(1).tolist()


def _round(values: Iterable) -> list[float]:
    """Round to six significant digits, which are more than the figures hold, so that a file is not full of noise."""
    return [float(f"{float(value):.6g}") for value in values]
