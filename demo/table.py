"""The run in numbers: the printed table and a plain verdict."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import mean, median

from demo.likeness import psnr, ssim
from demo.picture import Column, detail, speed_up

GAIN = 1.05  # below five per cent nobody notices, and a busy machine's noise is as large
# of PSNR in dB: about 40 is where people stop to tell pictures apart side by side
SEEN = ((40, "not to be seen"), (33, "small"), (27, "to be seen"), (float("-inf"), "large"))
BLOCK = "one SD1.5-sized block (4096 tokens, 320 channels, batch 2, float32 on the CPU)"


@dataclass(frozen=True)
class Block:
    """Seconds for one SD1.5-sized transformer block without and with merging; merging: its name."""

    merging: str
    plain: float
    merged: float

    @property
    def gain(self) -> float:
        return self.plain / self.merged

    def __str__(self) -> str:
        times = f"{self.plain * 1000:.0f} ms without merging, {self.merged * 1000:.0f} ms with {self.merging}"
        if self.gain < GAIN:
            return f"{BLOCK[0].upper()}{BLOCK[1:]}: {times}. Merging gains nothing there on this machine."
        return f"{BLOCK[0].upper()}{BLOCK[1:]}: {times}, {self.gain:.2f} times as fast."


def table(columns: list[Column]) -> str:
    """One line a variant; times are medians over the pictures, PSNR and SSIM means to the unmerged pictures, detail is
    gradient energy beside theirs.
    """
    heads = ("", "time", "speed-up", "CPU time", "CPU speed-up", "PSNR", "SSIM", "detail")
    lines = [heads, *(_line(column, columns[0]) for column in columns)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(heads))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def _line(column: Column, plain: Column) -> tuple[str, ...]:
    start = (column.variant.name, f"{median(column.wall):.2f} s")
    if column is plain:
        return (*start, "1.00", f"{median(column.cpu):.2f} s", "1.00", "-", "-", "-")
    pairs = list(zip(plain.pictures, column.pictures, strict=True))
    return (
        *start,
        f"{speed_up(plain.wall, column.wall):.2f}",
        f"{median(column.cpu):.2f} s",
        f"{speed_up(plain.cpu, column.cpu):.2f}",
        f"{mean(psnr(a, b) for a, b in pairs):.1f} dB",
        f"{mean(ssim(a, b) for a, b in pairs):.3f}",
        f"{detail(plain.pictures, column.pictures):.0%}",
    )


def verdict(columns: list[Column], on_cpu: bool) -> str:
    """What merging gained on these pictures on this machine, and what it changed.

    The clock decides, because it is what a user waits for; `on_cpu` adds processor time, which other programs
    disturb less.
    """
    best = max(columns[1:], key=lambda column: speed_up(columns[0].wall, column.wall))
    gain = speed_up(columns[0].wall, best.wall)
    effort = f" ({speed_up(columns[0].cpu, best.cpu):.2f} times by processor time)" if on_cpu else ""
    height, width = columns[0].pictures[0].shape[:2]
    if gain < GAIN:
        pictures = (f"Merging gains nothing on these {width}x{height} px pictures on this machine: the best setting, "
                    f"{best.variant.name}, was {gain:.2f} times as fast as no merging{effort}. "
                    "The smaller the picture, the less of its time is attention.")
    else:
        pictures = (f"Merging made these {width}x{height} px pictures up to {gain:.2f} times as fast "
                    f"on this machine, with {best.variant.name}{effort}.")
    return f"{pictures} {_change_sentence(columns[0], best)}"


def _change_sentence(plain: Column, best: Column) -> str:
    near = mean(psnr(a, b) for a, b in zip(plain.pictures, best.pictures, strict=True))
    seen = next(word for least, word in SEEN if near >= least)
    kept = detail(plain.pictures, best.pictures)
    return f"Its difference is {seen} (PSNR {near:.0f} dB), {kept:.0%} of the detail is kept."
