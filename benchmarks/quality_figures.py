"""The figures of a quality result: means over pictures, with the standard errors of paired means.

Other methods are compared with strength at equal time. Of a result's presets and strengths those count that no other
one beats in both time and PSNR; between two of them a line is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from benchmarks.results import Record
from benchmarks.variants import PLAIN
from demo.metrics import decibels

_NO_DETAIL = 1e-6  # the energy of a picture without detail, in squared steps of 255
ROLES = ("tomesd", "method", "control", "yardstick")
OURS = ("preset", "strength")
Parts = dict[int, dict[str, Any]]  # rows of one variant


class Mean(NamedTuple):
    """A mean over pictures and its standard error, which is None for one picture or an infinite value."""

    value: float
    error: float | None

    @classmethod
    def of(cls, values: np.ndarray) -> Mean:
        """Average one value a picture."""
        count = len(values)
        spread = float(np.std(values, ddof=1)) / math.sqrt(count) if count > 1 and np.isfinite(values).all() else None
        return cls(float(np.mean(values)), spread)


class Noised(NamedTuple):
    """A variant's figures of noised pictures; all but the work are in % of the unmerged v-loss."""

    work: float  # the share of the unmerged attention's products that is left
    gap: Mean  # the rise of the v-loss
    dev: Mean  # the squared distance of the prediction from the unmerged one
    dev_at: tuple[Mean, ...]  # the same at each of the result's timesteps


class Pictured(NamedTuple):
    """A variant's figures of whole pictures, compared with the unmerged ones."""

    work: float  # as in `Noised`
    psnr: Mean  # dB
    ssim: Mean
    detail: Mean | None = None  # gradient energy as a share of the unmerged picture's, the geometric mean
    time: float | None = None  # the time of all calls of a picture, as a share of the unmerged ones


class Section(NamedTuple):
    """All figures of one checkpoint, by variant's name, in the result's order."""

    checkpoint: str
    loss: float | None  # the unmerged v-loss; None without noised pictures
    counts: dict[str, int]  # of pictures: "noised" and "pictures"
    variants: dict[str, dict[str, Any]]  # as `Variant.describe` gives them
    noised: dict[str, Noised]
    pictures: dict[str, Pictured]


def sections(record: Record) -> list[Section]:
    """Compute the figures of each checkpoint of a result, finished or not."""
    return [_section(record, checkpoint) for checkpoint in record["settings"]["models"]]


def _section(record: Record, checkpoint: str) -> Section:
    parts_of: dict[str, dict[str, Parts]] = {"noised": {}, "pictures": {}}
    for row in record["rows"]:
        if row["checkpoint"] == checkpoint:
            parts_of[row["measure"]].setdefault(row["variant"], {})[row["part"]] = row
    plain = {measure: by_variant.get(PLAIN, {}) for measure, by_variant in parts_of.items()}
    variants = {variant["name"]: variant for variant in record["settings"]["variants"]}
    losses = _over(plain["noised"], "loss") if plain["noised"] else np.empty((0, 0))
    counts = {"noised": losses.shape[1], "pictures": sum(len(row["ssim"]) for row in plain["pictures"].values())}
    loss = float(losses.mean()) if losses.size else None

    def average(measure: str, make: Any, *more: Any) -> dict[str, Any]:
        measured = parts_of[measure]
        return {name: make(measured[name], {part: plain[measure][part] for part in measured[name]}, *more)
                for name in variants if name != PLAIN and name in measured}  # fmt: skip

    noised, pictures = average("noised", _noised, loss), average("pictures", _pictured)
    return Section(checkpoint, loss, counts, variants, noised, pictures)


def _over(parts: Parts, name: str, axis: int = -1) -> np.ndarray:
    """Join a field of all measured parts, in their order, along the axis of pictures."""
    return np.concatenate([np.array(parts[part][name]) for part in sorted(parts)], axis)


def _noised(parts: Parts, plain: Parts, loss: float) -> Noised:
    """Compute a variant's figures from its rows and the unmerged rows of the same parts. loss: unmerged."""
    scale = 100 / loss
    dev = scale * _over(parts, "dev")
    gap = scale * (_over(parts, "loss") - _over(plain, "loss"))
    work = float(np.mean([row["work"] for row in parts.values()]))
    return Noised(work, Mean.of(gap.mean(0)), Mean.of(dev.mean(0)), tuple(Mean.of(at) for at in dev))


def _pictured(parts: Parts, plain: Parts) -> Pictured:
    """Compute a variant's figures from its rows and the unmerged rows of the same parts."""
    def all_have(name: str) -> bool:
        return all(name in row for row in parts.values())

    work = float(np.average([row["work"] for row in parts.values()], weights=[len(r["ssim"]) for r in parts.values()]))
    ratios = np.array([decibels(error) for error in _over(parts, "squared_error")])
    detail = _detail(_over(parts, "gradient"), _over(plain, "gradient")) if all_have("gradient") else None
    time = None
    if all_have("seconds"):
        steps = np.median(_over(parts, "seconds", 0) / _over(parts, "beside")[:, None], 0)
        time = float(steps.sum() / _over(plain, "seconds", 0).shape[1])
    return Pictured(work, Mean.of(ratios), Mean.of(_over(parts, "ssim")), detail, time)


def _detail(energies: np.ndarray, unmerged: np.ndarray) -> Mean:
    """Average the ratio of gradient energies over pictures, geometrically."""
    logs = Mean.of(np.log(np.maximum(energies, _NO_DETAIL) / np.maximum(unmerged, _NO_DETAIL)))
    share = math.exp(logs.value)
    return Mean(share, None if logs.error is None else share * logs.error)


class Rival(NamedTuple):
    """Another method, compared with the setting ``strength`` at equal time.

    Attributes:
        name: the method's name.
        time: its time, as a share of the unmerged time.
        theirs: its PSNR in dB.
        ours: PSNR in dB of the strength that takes this time; None if no strength is as fast.
    """

    name: str
    time: float
    theirs: float
    ours: float | None


def at_equal_time(section: Section) -> Iterator[Rival]:
    """Compare each timed method of others with strength, in the result's order; without timed strengths, none."""
    points = {name: (figures.time, figures.psnr.value) for name, figures in section.pictures.items()
              if figures.time is not None}  # fmt: skip
    ours = {name for name in points if section.variants[name]["method"] in OURS}
    front: list[tuple[float, float]] = []  # by rising time, each with a higher PSNR than those before it
    for time, psnr in sorted((points[name] for name in ours), key=lambda point: (point[0], -point[1])):
        if not front or psnr > front[-1][1]:
            front.append((time, psnr))
    for name, (time, psnr) in points.items():
        if front and name not in ours and section.variants[name]["role"] in ("method", "tomesd"):
            # to a slower method the slowest strength compares
            yield Rival(name, time, psnr, float(np.interp(time, *zip(*front, strict=True)))
                        if time >= front[0][0] else None)  # fmt: skip
