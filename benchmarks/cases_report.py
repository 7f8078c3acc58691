"""The table of `benchmarks.cases`, from its rows alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.results import Record
from demo.metrics import decibels
from tome_core import preset

Row = dict[str, Any]
Group = dict[str, list[Row]]  # a case's rows, by strength
WHOLE, FEW = "20 steps", "4 steps"
_MARK, _WITHIN = "balanced", 0.1

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


def table(records: Sequence[Record]) -> str:
    """Markdown: for each model a row a case, and whether what a mark promises holds."""
    strengths = list(records[0]["settings"]["strengths"])
    promise = " / ".join(f"{expect(name):.3f}" for name in strengths)
    guidance = max(case["guidance"] for case in records[0]["settings"]["cases"])
    text = [_EXPLAINED.format(strengths=" / ".join(strengths), promised=promise, guidance=guidance)]
    for record in records:
        order = [case["name"] for case in record["settings"]["cases"]]
        rows = sorted(record["rows"], key=lambda row: order.index(row["case"]))
        for model in dict.fromkeys(row["model"] for row in record["rows"]):
            late = {case["name"] for case in record["settings"]["cases"] if case["denoise"] < 1}
            text += [f"### {model}", *_section([row for row in rows if row["model"] == model], strengths, late)]
        if record["missing"]:
            text.append(f"Unfinished: {len(record['missing'])} rows are missing.")
        text.append(f"`{record['command']}`; commit {record['commit']}; {record['device']['name']}.")
    return "\n\n".join(text)


def expect(strength: str) -> float:
    """Work that a mark leaves, on average over the whole noise schedule."""
    config = preset(strength)
    late, until = 1 - config.rules[0].ratio, config.early_until / 1000
    return late if config.early_ratio is None else late * until + (1 - config.early_ratio) * (1 - until)


def _section(rows: list[Row], strengths: list[str], late: set[str]) -> list[str]:
    cases: dict[str, Group] = {}
    for row in rows:
        cases.setdefault(row["case"], {}).setdefault(row["strength"], []).append(row)
    lines = [f"| case | pictures | {' | '.join(_FIGURES)} |", "|---|---:|---|---|---|---|---|"]
    lines += [_line(name, group, strengths) for name, group in cases.items()]
    said = _numbers(cases, late)
    return ["\n".join(lines), *(["\n".join(said)] if said else [])]


# of a row: its figures, one or one a picture, over which cells are means, and how these are written
_FIGURES: dict[str, tuple[Callable[[Row], list[float]], str]] = {
    "work": (lambda row: [row["work"]], ".3f"),
    "time": (lambda row: [row["seconds"][1] / row["seconds"][0]] if "seconds" in row else [], ".2f"),
    "PSNR dB": (lambda row: [decibels(error) for error in row["squared_error"]], ".1f"),
    "rms": (lambda row: [error**0.5 for error in row["squared_error"]], ".2f"),
    "detail": (lambda row: [merged / plain for plain, merged in row["gradient"]], ".3f"),
}


def _mean(rows: list[Row], figure: str) -> float:
    """Not a number where no row has it: some are older than the clock."""
    values = [value for row in rows for value in _FIGURES[figure][0](row)]
    return float(np.mean(values)) if values else math.nan


def _line(name: str, group: Group, strengths: list[str]) -> str:
    there = [group.get(strength, []) for strength in strengths]
    count = min(sum(len(row["squared_error"]) for row in rows) for rows in there)
    cells = (" / ".join(f"{_mean(rows, figure):{form}}" for rows in there).replace("nan", "-")
             for figure, (_, form) in _FIGURES.items())  # fmt: skip
    return f"| {name} | {count} | {' | '.join(cells)} |"


def _numbers(cases: dict[str, Group], late: set[str]) -> list[str]:
    """Four steps err no more than twenty; passes that begin late leave the work that the mark promises within a tenth,
    and err at most a tenth more than a whole picture.
    """
    marked = {name: group[_MARK] for name, group in cases.items() if _MARK in group}
    rms = {name: _mean(rows, "rms") for name, rows in marked.items()}
    said = []
    if WHOLE in marked and FEW in marked:
        said.append(f"- {FEW}, {_MARK}: rms {rms[FEW]:.2f}, at {WHOLE} {rms[WHOLE]:.2f}: "
                    f"{_verdict(rms[FEW] <= rms[WHOLE])}.")  # fmt: skip
    for name in marked:
        if WHOLE in marked and name in late:
            more, error = _mean(marked[name], "work") / expect(_MARK) - 1, rms[name] / rms[WHOLE] - 1
            said.append(f"- {name}, {_MARK}: work {more:+.0%} of the promise, {_verdict(abs(more) <= _WITHIN)}; "
                        f"rms {error:+.0%} of {WHOLE}, {_verdict(error <= _WITHIN)}.")  # fmt: skip
    return said


def _verdict(holds: bool) -> str:
    return "holds" if holds else "DOES NOT HOLD"
