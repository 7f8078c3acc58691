"""The run in numbers: the printed table and a plain verdict."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import mean, median

from demo.likeness import psnr, ssim
from demo.picture import Column, speed_up

GAIN = 1.05  # below five per cent nobody notices, and a busy machine's noise is as large
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


def table(columns: list[Column]) -> str:
    """One line a variant; times are medians over the pictures, PSNR and SSIM means to the unmerged pictures."""
    heads = ("", "time", "speed-up", "CPU time", "CPU speed-up", "PSNR", "SSIM")
    lines = [heads, *(_line(column, columns[0]) for column in columns)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(heads))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def _line(column: Column, plain: Column) -> tuple[str, ...]:
    start = (column.variant.name, f"{median(column.wall):.2f} s")
    if column is plain:
        return (*start, "1.00", f"{median(column.cpu):.2f} s", "1.00", "-", "-")
    pairs = list(zip(plain.pictures, column.pictures, strict=True))
    return (
        *start,
        f"{speed_up(plain.wall, column.wall):.2f}",
        f"{median(column.cpu):.2f} s",
        f"{speed_up(plain.cpu, column.cpu):.2f}",
        f"{mean(psnr(a, b) for a, b in pairs):.1f} dB",
        f"{mean(ssim(a, b) for a, b in pairs):.3f}",
    )


def verdict(columns: list[Column], block: Block, on_cpu: bool) -> str:
    """Two sentences: what merging gained on these pictures on this machine, and on a block of real size.

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
    return f"{pictures}\n{_block_sentence(block)}"


def _block_sentence(block: Block) -> str:
    times = f"{block.plain * 1000:.0f} ms without merging, {block.merged * 1000:.0f} ms with {block.merging}"
    if block.gain < GAIN:
        return f"{BLOCK[0].upper()}{BLOCK[1:]}: {times}. Merging gains nothing there either on this machine."
    return f"{BLOCK[0].upper()}{BLOCK[1:]}: {times}, {block.gain:.2f} times as fast."
