"""The rows of a quality result: which there are, and how each is measured.

A row is one variant on one part of the pictures of one checkpoint, so that little is lost when a run is killed.
Everything is paired: the rows of a part share pictures, noise, times and the seed of whatever is drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image

from benchmarks import attention_work
from benchmarks.attention_work import BESIDE, CallTimes
from benchmarks.networks import UNET
from benchmarks.subjects import PART_NOISED, SceneSubject, Subject
from benchmarks.variant_list import PLAIN, VARIANTS
from benchmarks.variants import Variant
from demo.metrics import gradient_energy, squared_error, ssim

TIMES = (50, 200, 400, 600, 800, 950)
PART_PICTURES = {True: 4, False: 1}  # pictures in one row: of a scene model, of a user's model, which takes minutes


@dataclass(frozen=True)
class Amounts:
    """How much is measured: noised pictures and their times, whole pictures and their solver steps, and the seed.

    clock: is the time of whole pictures' calls taken too.
    """

    noised: int
    pictures: int
    steps: int
    times: tuple[int, ...] = TIMES
    seed: int = 0
    clock: bool = False


@dataclass(frozen=True)
class Row:
    """One row to measure: pictures `first` to `first + count` of a checkpoint, of which it is part number `part`."""

    checkpoint: str
    measure: str
    part: int
    first: int
    count: int
    variant: str

    @property
    def key(self) -> str:
        return f"{self.checkpoint}/{self.measure}/{self.part}/{self.variant}"

    @property
    def group(self) -> tuple[str, str, int]:
        """Rows of one group share the unmerged prediction they are compared with."""
        return self.checkpoint, self.measure, self.part

    def describe(self) -> dict[str, Any]:
        """The part of it that a result keeps beside its figures."""
        return {"checkpoint": self.checkpoint, "measure": self.measure, "part": self.part, "variant": self.variant}


def calls(row: Row, amounts: Amounts) -> int:
    """Pictures that go through the network for this row, for the time left."""
    if row.measure == "noised":
        return row.count * len(amounts.times)
    a_picture = amounts.steps * VARIANTS[row.variant].solver + (BESIDE if amounts.clock else 0)
    return row.count * 2 * a_picture


def rows(
    checkpoint: str, names: dict[str, tuple[str, ...]], amounts: Amounts, can_be_noised: bool, kind: str = UNET
) -> Iterator[Row]:
    """All rows of a checkpoint, those of a part together, the unmerged one first.

    names: variants by measure; of those that its network, which is of this kind, can do. kind: as of `networks.KINDS`.
    """
    sizes = {"noised": PART_NOISED, "pictures": PART_PICTURES[can_be_noised]}
    totals = {"noised": amounts.noised if can_be_noised else 0, "pictures": amounts.pictures}
    for measure, size in sizes.items():
        chosen = [name for name in names[measure]
                  if measure in VARIANTS[name].measures and kind in VARIANTS[name].kinds]  # fmt: skip
        for part, first in enumerate(range(0, totals[measure], size)):
            count = min(size, totals[measure] - first)
            yield from (Row(checkpoint, measure, part, first, count, name) for name in chosen)


class Made(NamedTuple):
    """A picture uint8 ``[H, W, 3]``, its share of the attention work, the seconds of its calls and of unmerged ones."""

    pixels: np.ndarray
    work: float
    seconds: list[float]
    beside: float | None


class QualityBench:
    """Measures rows on one checkpoint; keeps the unmerged results of the latest group only."""

    def __init__(self, subject: Subject, amounts: Amounts, save: Path | None = None) -> None:
        self.subject, self.amounts, self.save = subject, amounts, save and save / subject.name
        self.work, self.times = attention_work.counting(subject.network), CallTimes(subject.network)
        self._group: tuple | None = None
        self._plain: list = []

    @torch.inference_mode()
    def measure(self, row: Row) -> dict[str, Any]:
        """The figures of a row: lists over pictures, for noised ones lists over times of such lists."""
        work = self._noised if row.measure == "noised" else self._pictures
        return work(row, VARIANTS[row.variant])

    def _noised(self, row: Row, variant: Variant) -> dict[str, Any]:
        def predict(one: Variant) -> list:
            return [self._predict(row, one, time) for time in self.amounts.times]

        found, plain = self._beside_plain(row, variant, predict)
        apart = [_error(one[0], other[0]) for one, other in zip(found, plain, strict=True)]
        kept = {"loss": [loss for _, loss, _ in found], "dev": apart}
        return {"work": _round(share for *_, share in found),
                **{name: [_round(one) for one in many] for name, many in kept.items()}}  # fmt: skip

    def _beside_plain(self, row: Row, variant: Variant, make: Callable[[Variant], list]) -> tuple[list, list]:
        """What the variant makes and what the unmerged model makes, which is made once for a group of rows."""
        if self._group != row.group:
            self._group, self._plain = row.group, make(VARIANTS[PLAIN])
        return (self._plain if variant.name == PLAIN else make(variant)), self._plain

    def _predict(self, row: Row, variant: Variant, time: int) -> tuple[torch.Tensor, list[float], float]:
        subject: SceneSubject = self.subject
        noised = subject.add_noise(row.part, row.count, time)
        with self.work, variant.put_on(subject.network, self._seed(row.part)):
            prediction = subject.predict(noised)
        return prediction, _error(prediction, noised.velocity), self.work.share()

    def _pictures(self, row: Row, variant: Variant) -> dict[str, Any]:
        def make(one: Variant) -> list:
            return [self._picture(one, number) for number in range(row.first, row.first + row.count)]

        found, plain = self._beside_plain(row, variant, make)
        pairs = [(one.pixels, other.pixels) for one, other in zip(plain, found, strict=True)]
        kept = {
            "work": _round([np.mean([one.work for one in found])])[0],
            "gradient": _round([gradient_energy(one.pixels) for one in found]),
            "squared_error": _round([squared_error(*pair) for pair in pairs]),
            "ssim": _round([ssim(*pair) for pair in pairs]),
        }
        if self.amounts.clock:
            kept["seconds"] = [_round(one.seconds) for one in found]
            kept["beside"] = _round(one.beside for one in found)
        return kept

    def _picture(self, variant: Variant, number: int) -> Made:
        with self.times, self.work, variant.put_on(self.subject.network, self._seed(number)):
            made = self.subject.picture(number, self.amounts.steps * variant.solver)
        if self.save:
            self._keep(made, variant, number)
        beside = self.times.time_unmerged() if self.amounts.clock else None
        return Made(made, self.work.share(), self.times.seconds, beside)

    def _seed(self, number: int) -> int:
        """The seed of what a method draws for a picture or a part."""
        return self.amounts.seed + self.subject.purpose.first + number

    def _keep(self, picture: np.ndarray, variant: Variant, number: int) -> None:
        folder = self.save / variant.name
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture).save(folder / f"{number:05}.png")


def _error(a: torch.Tensor, b: torch.Tensor) -> list[float]:
    """Mean squared difference of each picture."""
    return (a - b).double().pow(2).flatten(1).mean(1).tolist()


def _round(values: Iterable) -> list[float]:
    """Six digits: more than the figures hold, and a result that is not all noise digits."""
    return [float(f"{float(value):.6g}") for value in values]
