"""The tables of ``python -m benchmarks.own_error``: the engine's estimates beside the errors of pictures."""

from __future__ import annotations

import math

from benchmarks.report import markdown
from benchmarks.results import Record


def decibels(squared_error: float) -> float:
    """Return a mean squared error of numbers from 0 to 1 as a PSNR in dB; infinity for 0."""
    return -10 * math.log10(squared_error) if squared_error else math.inf


def table(records: list[Record]) -> str:
    """Make the Markdown of results: a line a row, with PSNR and the share of work saved."""
    rows = [(row["key"], f"{decibels(row['squared_error']):.1f}", f"{row['work_saved']:.1%}")
            for record in records for row in record["rows"]]  # fmt: skip
    return markdown(("picture", "PSNR dB", "less work"), rows, left=1)
