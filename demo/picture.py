"""The comparison run: the same pictures without merging and at several strengths, timed side by side."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median

import numpy as np

import tome_core
from demo.clock import told_times
from demo.likeness import gradient_energy
from demo.source import Source
from tome_core.settings.presets import DEFAULT, MARKS


@dataclass(frozen=True)
class Variant:
    """One way to make the pictures. strength: 0..1, None to leave the model alone."""

    strength: float | None

    @property
    def name(self) -> str:
        """Its heading: the strength, and the preset that it is."""
        preset = next((f" ({name})" for name, mark in MARKS.items() if mark == self.strength), "")
        return "no merging" if self.strength is None else f"strength {self.strength:g}{preset}"


UNMERGED, BALANCED = Variant(None), Variant(MARKS[DEFAULT])
STRENGTHS = (MARKS["quality"], MARKS[DEFAULT], MARKS["max"])


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
    if variant.strength is None:
        return source.picture(order.prompt, order.seed, steps, on_step), None
    with tome_core.patch(source.target, strength=variant.strength, host_clock=True) as handle:
        picture = source.picture(order.prompt, order.seed, steps, told_times(source, steps, handle, on_step))
        return picture, handle.report()


def variants(strengths: Sequence[float]) -> tuple[Variant, ...]:
    """No merging first, then each strength."""
    return (UNMERGED, *map(Variant, strengths))


def compare(
    source: Source, wanted: list[Order], steps: int, ways: Sequence[Variant], on_step: Callable[[], None],
    announce: Callable[[str], None],
) -> list[Column]:
    """Make every order in every way; gives one column a way, in their order.

    The ways take turns picture by picture, starting with another one each time, so that a machine that gets
    slower or busier does so for all of them. `on_step` is called steps x orders x ways times.
    """
    announce("warming up")
    for variant in ways[:2]:
        make(source, wanted[0], min(steps, 2), variant, lambda: None)
    columns = {variant: Column(variant) for variant in ways}
    for i, order in enumerate(wanted):
        turn = i % len(ways)
        for variant in (*ways[turn:], *ways[:turn]):
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


def detail(plain: Sequence[np.ndarray], merged: Sequence[np.ndarray]) -> float:
    """Detail kept, as a share: gradient energy of the merged pictures over that of the plain ones."""
    return sum(map(gradient_energy, merged)) / max(sum(map(gradient_energy, plain)), 1e-9)


def speed_up(plain: list[float], merged: list[float]) -> float:
    """How many times as fast: the median over pictures of plain / merged seconds. Above 1 is a gain."""
    return median(a / b for a, b in zip(plain, merged, strict=True))
