"""The same pictures without merging and at several strengths: timed side by side, in a table and in a sentence."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import mean, median

import numpy as np

import tome_core
from demo.metrics import gradient_energy, psnr, ssim
from demo.source import OnStep, Source, tell_times
from tome_core.settings.presets import DEFAULT, MARKS

STRENGTHS = (MARKS["quality"], MARKS[DEFAULT], MARKS["max"])
GAIN = 1.05  # a user notices no gain below five per cent, and a busy machine's noise is as large
# of PSNR in dB: about 40 is where people stop to tell pictures apart side by side
SEEN = ((40, "not to be seen"), (33, "small"), (27, "to be seen"), (float("-inf"), "large"))


@dataclass(frozen=True)
class Order:
    """One picture to make, at every strength with the same prompt and seed."""

    prompt: str
    seed: int


@dataclass
class Column:
    """The pictures of one strength, uint8 [H, W, 3], and the seconds of each, by the clock and of processor time.

    strength: None for no merging. report: the merging report of the last picture, "" without merging.
    """

    strength: float | None
    pictures: list[np.ndarray] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    report: str = ""

    @property
    def name(self) -> str:
        """The heading: "no merging" for None, else such as "strength 0.6", or for presets "strength 0.5 (balanced)"."""
        preset = next((f" ({name})" for name, mark in MARKS.items() if mark == self.strength), "")
        return "no merging" if self.strength is None else f"strength {self.strength:g}{preset}"


def make(source: Source, order: Order, steps: int, strength: float | None, on_step: OnStep):
    """Return (picture, Report), the target patched at a strength from 0 to 1; None: unpatched, "" for the Report."""
    if strength is None:
        return source.picture(order.prompt, order.seed, steps, on_step), ""
    with tome_core.patch(source.target, strength=strength, host_clock=True) as handle:
        picture = source.picture(order.prompt, order.seed, steps, tell_times(source, steps, handle, on_step))
        return picture, handle.report()


def compare(
    source: Source, wanted: list[Order], steps: int, strengths: Sequence[float | None], on_step: OnStep,
    announce: Callable[[str], None],
) -> list[Column]:
    """Make every order at every strength, None for no merging; return a column for each strength, in their order.

    Strengths take turns picture by picture, starting with another one each time, so that a machine that gets slower or
    busier does so for all. `announce` gets a line before the warm-up, which does not count, and before each picture.
    `on_step` is called steps x orders x strengths times.
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
    """Compute the mean over pairs of pictures of their PSNR in dB; infinite if any pair is equal."""
    return mean(psnr(a, b) for a, b in zip(plain.pictures, merged.pictures, strict=True))


def detail(plain: Sequence[np.ndarray], merged: Sequence[np.ndarray]) -> float:
    """Compute the share of detail kept: the merged pictures' sum of `gradient_energy` over the plain pictures'."""
    return sum(map(gradient_energy, merged)) / max(sum(map(gradient_energy, plain)), 1e-9)


def speed_up(plain: list[float], merged: list[float]) -> float:
    """Compute how many times as fast: the median over pictures of plain / merged seconds. Above 1 is a gain."""
    return median(a / b for a, b in zip(plain, merged, strict=True))


def table(columns: list[Column]) -> str:
    """Make a table of median times, by clock and CPU, and likeness: a line of headings, then one for each column.

    Speed-ups, PSNR, SSIM and detail compare a column with the first, which is unmerged and has "-" for the last three.
    """
    heads = ("", "time", "speed-up", "CPU time", "CPU speed-up", "PSNR", "SSIM", "detail")
    lines = [heads, *(_line(column, columns[0]) for column in columns)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(heads))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def _line(column: Column, plain: Column) -> tuple[str, ...]:
    """List the texts of a column's line in `table`; PSNR, SSIM and detail are "-" if `column` is `plain`."""
    likeness = ("-", "-", "-") if column is plain else (
        f"{nearness(plain, column):.1f} dB",
        f"{mean(ssim(a, b) for a, b in zip(plain.pictures, column.pictures, strict=True)):.3f}",
        f"{detail(plain.pictures, column.pictures):.0%}",
    )
    return (column.name, f"{median(column.wall):.2f} s", f"{speed_up(plain.wall, column.wall):.2f}",
            f"{median(column.cpu):.2f} s", f"{speed_up(plain.cpu, column.cpu):.2f}", *likeness)  # fmt: skip


def verdict(columns: list[Column], on_cpu: bool) -> str:
    """Say in three sentences or less what the fastest strength gained over columns[0], and how near its pictures are.

    A gain below GAIN is called none. on_cpu: tell the gain in processor time, too.
    """
    best = max(columns[1:], key=lambda column: speed_up(columns[0].wall, column.wall))
    gain = speed_up(columns[0].wall, best.wall)
    effort = f" ({speed_up(columns[0].cpu, best.cpu):.2f} times by processor time)" if on_cpu else ""
    height, width = columns[0].pictures[0].shape[:2]
    if gain < GAIN:
        pictures = (f"Merging gains nothing on these {width}x{height} px pictures on this machine: the best setting, "
                    f"{best.name}, was {gain:.2f} times as fast as no merging{effort}. "
                    "The smaller the picture, the less of its time is attention.")
    else:
        pictures = (f"Merging made these {width}x{height} px pictures up to {gain:.2f} times as fast "
                    f"on this machine, with {best.name}{effort}.")
    near, kept = nearness(columns[0], best), detail(columns[0].pictures, best.pictures)
    seen = next(word for least, word in SEEN if near >= least)
    return f"{pictures} Its difference is {seen} (PSNR {near:.0f} dB), {kept:.0%} of the detail is kept."
