"""The run in numbers: the printed table and a plain verdict."""

from __future__ import annotations

from statistics import mean, median

from demo.comparison import Column, detail, nearness, speed_up
from demo.metrics import ssim

GAIN = 1.05  # below five per cent nobody notices, and a busy machine's noise is as large
# of PSNR in dB: about 40 is where people stop to tell pictures apart side by side
SEEN = ((40, "not to be seen"), (33, "small"), (27, "to be seen"), (float("-inf"), "large"))


def table(columns: list[Column]) -> str:
    """A line for each column: the pictures' median times, their mean PSNR and SSIM to the unmerged ones, and detail."""
    heads = ("", "time", "speed-up", "CPU time", "CPU speed-up", "PSNR", "SSIM", "detail")
    lines = [heads, *(_line(column, columns[0]) for column in columns)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(heads))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def _line(column: Column, plain: Column) -> tuple[str, ...]:
    likeness = ("-", "-", "-") if column is plain else (
        f"{nearness(plain, column):.1f} dB",
        f"{mean(ssim(a, b) for a, b in zip(plain.pictures, column.pictures, strict=True)):.3f}",
        f"{detail(plain.pictures, column.pictures):.0%}",
    )
    return (column.name, f"{median(column.wall):.2f} s", f"{speed_up(plain.wall, column.wall):.2f}",
            f"{median(column.cpu):.2f} s", f"{speed_up(plain.cpu, column.cpu):.2f}", *likeness)  # fmt: skip


def verdict(columns: list[Column], on_cpu: bool) -> str:
    """What merging gained on these pictures by the clock, which a user waits for, and what it changed.

    on_cpu: add processor time, which other programs disturb less.
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
