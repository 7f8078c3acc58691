"""The comparison run: the same pictures without merging and at several strengths, timed side by side."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import mean, median

import numpy as np

import tome_core
from demo.metrics import gradient_energy, psnr
from demo.source import OnStep, Source, tell_times
from tome_core.settings.presets import DEFAULT, MARKS

STRENGTHS = (MARKS["quality"], MARKS[DEFAULT], MARKS["max"])


@dataclass(frozen=True)
class Order:
    """One picture to make; every column has it from the same seed."""

    prompt: str
    seed: int


@dataclass
class Column:
    """What one strength made (None: no merging): uint8 [H, W, 3], seconds by the wall clock and of processor time."""

    strength: float | None
    pictures: list[np.ndarray] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    report: str = ""

    @property
    def name(self) -> str:
        return heading(self.strength)


def heading(strength: float | None) -> str:
    """Of a strength, with the preset that it is; None is no merging."""
    preset = next((f" ({one})" for one, mark in MARKS.items() if mark == strength), "")
    return "no merging" if strength is None else f"strength {strength:g}{preset}"


def make(source: Source, order: Order, steps: int, strength: float | None, on_step: OnStep):
    """One picture and the merging report. Without merging the model is not patched at all, and nothing reported."""
    if strength is None:
        return source.picture(order.prompt, order.seed, steps, on_step), ""
    with tome_core.patch(source.target, strength=strength, host_clock=True) as handle:
        picture = source.picture(order.prompt, order.seed, steps, tell_times(source, steps, handle, on_step))
        return picture, handle.report()


def compare(
    source: Source, wanted: list[Order], steps: int, strengths: Sequence[float | None], on_step: OnStep,
    announce: Callable[[str], None],
) -> list[Column]:
    """Make every order at every strength; gives a column for each, in their order.

    They take turns picture by picture, starting with another one each time, so that a machine that gets
    slower or busier does so for all of them. `on_step` is called steps x orders x strengths times.
    """
    announce("warming up")
    for strength in strengths[:2]:
        make(source, wanted[0], min(steps, 2), strength, lambda: None)
    columns = [Column(strength) for strength in strengths]
    for i, order in enumerate(wanted):
        turn = i % len(columns)
        for column in (*columns[turn:], *columns[:turn]):
            announce(f"picture {i + 1} of {len(wanted)}, {column.name}")
            wall, cpu = time.perf_counter(), time.process_time()
            # Ends on the host with the finished picture, so work queued on a GPU is counted without a sync of its own.
            picture, report = make(source, order, steps, column.strength, on_step)
            column.wall.append(time.perf_counter() - wall)
            column.cpu.append(time.process_time() - cpu)
            column.pictures.append(picture)
            column.report = str(report)
    return columns


def nearness(plain: Column, merged: Column) -> float:
    """Mean PSNR of the merged pictures to the plain ones, dB."""
    return mean(psnr(a, b) for a, b in zip(plain.pictures, merged.pictures, strict=True))


def detail(plain: Sequence[np.ndarray], merged: Sequence[np.ndarray]) -> float:
    """Detail kept, as a share: gradient energy of the merged pictures over that of the plain ones."""
    return sum(map(gradient_energy, merged)) / max(sum(map(gradient_energy, plain)), 1e-9)


def speed_up(plain: list[float], merged: list[float]) -> float:
    """How many times as fast: the median over pictures of plain / merged seconds. Above 1 is a gain."""
    return median(a / b for a, b in zip(plain, merged, strict=True))
