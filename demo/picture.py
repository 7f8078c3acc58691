"""The comparison run: the same pictures without merging, with the preset and at several ratios, timed side by side."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

import numpy as np

import tome_core
from demo.clock import told_times
from demo.source import Source
from tome_core.presets import DEFAULT


@dataclass(frozen=True)
class Variant:
    """One way to make the pictures. merging: what `tome_core.patch` takes, None to leave the model alone."""

    name: str
    merging: tome_core.MergeConfig | str | None


UNMERGED = Variant("no merging", None)
PRESET = Variant(f"preset {DEFAULT}", DEFAULT)
RATIOS = tuple(Variant(f"ratio {ratio}", tome_core.MergeConfig(ratio=ratio)) for ratio in (0.25, 0.5, 0.75))
VARIANTS = (UNMERGED, PRESET, *RATIOS)


@dataclass(frozen=True)
class Order:
    """One picture to make; every variant makes it from the same seed."""

    prompt: str
    seed: int


@dataclass
class Column:
    """What one variant made: pictures uint8 [H, W, 3], seconds by the wall clock and of processor time."""

    variant: Variant
    pictures: list[np.ndarray] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    report: str = ""


def orders(prompts: list[str], count: int, seed: int) -> list[Order]:
    """`count` orders that take the prompts in turn, each with a seed of its own from `seed` on."""
    return [Order(prompts[i % len(prompts)], seed + i) for i in range(count)]


def make(source: Source, order: Order, steps: int, variant: Variant, on_step: Callable[[], None]):
    """One picture and the merging report (None for UNMERGED, which is not patched at all)."""
    if variant.merging is None:
        return source.picture(order.prompt, order.seed, steps, on_step), None
    with tome_core.patch(source.target, variant.merging, host_clock=True) as handle:
        picture = source.picture(order.prompt, order.seed, steps, told_times(source, steps, handle, on_step))
        return picture, handle.report()


def compare(
    source: Source, wanted: list[Order], steps: int, on_step: Callable[[], None], announce: Callable[[str], None]
) -> list[Column]:
    """Make every order in every variant; gives one column a variant, UNMERGED first.

    The variants take turns picture by picture, starting with another one each time, so that a machine that gets
    slower or busier does so for all of them. `on_step` is called steps x orders x variants times.
    """
    announce("warming up")
    for variant in (UNMERGED, PRESET):
        make(source, wanted[0], min(steps, 2), variant, lambda: None)
    columns = {variant: Column(variant) for variant in VARIANTS}
    for i, order in enumerate(wanted):
        turn = i % len(VARIANTS)
        for variant in VARIANTS[turn:] + VARIANTS[:turn]:
            announce(f"picture {i + 1} of {len(wanted)}, {variant.name}")
            _timed(columns[variant], source, order, steps, on_step)
    return list(columns.values())


def _timed(column: Column, source: Source, order: Order, steps: int, on_step: Callable[[], None]) -> None:
    wall, cpu = time.perf_counter(), time.process_time()
    # Ends on the host with the finished picture, so work queued on a GPU is counted without a sync of its own.
    picture, report = make(source, order, steps, column.variant, on_step)
    column.wall.append(time.perf_counter() - wall)
    column.cpu.append(time.process_time() - cpu)
    column.pictures.append(picture)
    column.report = str(report or "")


def speed_up(plain: list[float], merged: list[float]) -> float:
    """How many times as fast: the median over pictures of plain / merged seconds. Above 1 is a gain."""
    return median(a / b for a, b in zip(plain, merged, strict=True))
