"""The table of `benchmarks.cases`, from its rows alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.report import markdown
from benchmarks.results import Record
from demo.metrics import decibels
from tome_core import preset

Row = dict[str, Any]

_EXPLAINED = """\
Four figures a cell: {strengths}. Work: share of the finest self-attention's products that is left, counted while the
pictures were drawn; over a whole noise schedule the marks promise {promised}, and in a pass that begins late the same,
to the nearest of its steps. Time: processor time of a picture on one thread, merged beside unmerged. PSNR, and rms in
steps of 255: of merged pictures beside the unmerged ones of the same case, means over pictures. Detail: their gradient
energy as a share of the unmerged ones'. Guidance {guidance:g} unless the case says 1. Shapes of few-step models (Turbo,
Lightning, LCM, Hyper) are their solvers, times and guidance on a scene model that is not distilled. Img2img,
inpainting, hires and tiled cases begin with a held-out scene, the last two with it at twice the size. No ControlNet,
IP-Adapter or LoRA was trained for the scene models, and their prompts know no regions, so those are laws of the tests,
not rows."""
# of a row: its figures, one or one a picture, over which cells are means, and how these are written
_FIGURES: dict[str, tuple[Callable[[Row], list[float]], str]] = {
    "work": (lambda row: [row["work"]], ".3f"),
    "time": (lambda row: [row["seconds"][1] / row["seconds"][0]], ".2f"),
    "PSNR dB": (lambda row: [decibels(error) for error in row["squared_error"]], ".1f"),
    "rms": (lambda row: [error**0.5 for error in row["squared_error"]], ".2f"),
    "detail": (lambda row: [merged / plain for plain, merged in row["gradient"]], ".3f"),
}


def table(records: Sequence[Record]) -> str:
    """Markdown: for each model a row a case."""
    strengths = list(records[0]["settings"]["strengths"])
    promise = " / ".join(f"{expect(name):.3f}" for name in strengths)
    guidance = max(case["guidance"] for case in records[0]["settings"]["cases"])
    text = [_EXPLAINED.format(strengths=" / ".join(strengths), promised=promise, guidance=guidance)]
    for record in records:
        for model in dict.fromkeys(row["model"] for row in record["rows"]):
            there = {row["case"] for row in record["rows"] if row["model"] == model}
            names = [case["name"] for case in record["settings"]["cases"] if case["name"] in there]
            cells = (_cells(record, model, name, strengths) for name in names)
            text += [f"### {model}", markdown(("case", "pictures", *_FIGURES), cells)]
        if record["missing"]:
            text.append(f"Unfinished: {len(record['missing'])} rows are missing.")
        text.append(f"`{record['command']}`; commit {record['commit']}; {record['device']['name']}.")
    return "\n\n".join(text)


def expect(strength: str) -> float:
    """Work that a mark leaves, on average over the whole noise schedule."""
    config = preset(strength)
    late, until = 1 - config.rules[0].ratio, config.early_until / 1000
    return late if config.early_ratio is None else late * until + (1 - config.early_ratio) * (1 - until)


def _cells(record: Record, model: str, case: str, strengths: list[str]) -> list[str]:
    """A row of the table: the fewest pictures that all strengths have, and the figures of all."""
    rows = [[row for row in record["rows"] if (row["model"], row["case"], row["strength"]) == (model, case, strength)]
            for strength in strengths]  # fmt: skip
    count = min(sum(len(row["squared_error"]) for row in some) for some in rows)
    return [case, str(count), *(" / ".join(_mean(some, figure) for some in rows) for figure in _FIGURES)]


def _mean(rows: list[Row], figure: str) -> str:
    values, form = _FIGURES[figure]
    found = [value for row in rows for value in values(row)]
    return f"{np.mean(found):{form}}" if found else "-"
