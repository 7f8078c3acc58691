"""The table of `benchmarks.stacking`, from its rows alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

from benchmarks.report import markdown
from benchmarks.results import Record
from benchmarks.stack_arms import ALONE, MERGED, OURS_FIRST, PLAIN, THEIRS_FIRST
from benchmarks.stack_beside import BESIDE, LEFT_OUT
from benchmarks.stack_nodes import NODES

Row = dict[str, Any]
_OTHERS = {**BESIDE, **NODES}
_BOTH = (OURS_FIRST, THEIRS_FIRST)
_HEAD = (
    "beside", "model", "of", "calls", "alone", "merging alone", "both, ours first", "both, theirs first", "of the sum",
    "from alone", "times as fast alone", "merging alone", "both, ours first", "both, theirs first", "of the product",
    "off again",
)  # fmt: skip

_EXPLAINED = """\
Merging: preset {preset}. "of": pictures, or rounds of steps; "calls": of the network that were computed for one, plain,
with the other alone, and with both. Errors: root mean square distance from the plain picture, in steps of 255 (of
models with random weights: of its latent); "of the sum": the worse order's share of the sum of both errors alone; "from
alone": distance of both from the other method alone, which is what merging changes where the other draws another
picture on purpose. Times: processor seconds of all calls of the network (of nodes: of the whole sampling) on one
thread, plain divided by with it; "of the product": the slower order's share of the product of both factors."""


def table(records: Sequence[Record]) -> str:
    """Markdown: a row for each model and method, medians over pictures and rounds, then what was told and left out."""
    rows = [row for record in records for row in record["rows"]]
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["beside"], row["model"]), []).append(row)
    lines = ([name, model, *_figures(group)] for (name, model), group in groups.items())
    made = records[0]
    text = [
        _EXPLAINED.format(preset=made["settings"]["preset"]),
        markdown(_HEAD, lines, " --- "),
        "\n".join(f"- *{name}*: {_OTHERS[name].meaning}." for name in dict.fromkeys(name for name, _ in groups)),
        "What merging reports beside each, where it leaves calls out:\n\n" + "\n".join(_tell(groups)),
        "Not in the table:\n\n" + "\n".join(f"- *{name}*: {why}." for name, why in LEFT_OUT.items()),
        f"{made['device']['name']}, {made['device']['threads']} thread; {made['command']}; commit {made['commit']}.",
    ]
    return "\n\n".join(text)


def _figures(rows: list[Row]) -> list[str]:
    rms, from_alone = (_medians(row[field] for row in rows) for field in ("rms", "from_alone"))
    shares = [max(row["rms"][arm] for arm in _BOTH) / (row["rms"][ALONE] + row["rms"][MERGED]) for row in rows]
    factors = [{arm: row["seconds"][PLAIN] / spent for arm, spent in row["seconds"].items()} for row in rows]
    products = [min(one[arm] for arm in _BOTH) / (one[ALONE] * one[MERGED]) for one in factors]
    factor, shown = _medians(factors), (ALONE, MERGED, *_BOTH)
    calls = {arm: median(row["calls"][arm] for row in rows) for arm in (PLAIN, ALONE, OURS_FIRST)}
    return [
        str(len(rows)), ", ".join(f"{count:g}" for count in calls.values()),
        *(f"{rms[arm]:.3g}" for arm in shown), f"{median(shares):.2f}",
        " and ".join(dict.fromkeys(f"{from_alone[arm]:.3g}" for arm in _BOTH)),
        *(f"{factor[arm]:.2f}" for arm in shown), f"{median(products):.2f}",
        "the same bits" if all(row["off_is_exact"] for row in rows) else "OTHER BITS",
    ]  # fmt: skip


def _medians(rows: Iterable[dict[str, float]]) -> dict[str, float]:
    """By arm."""
    first, *others = rows
    return {arm: median(row[arm] for row in (first, *others)) for arm in first}


def _tell(groups: dict[tuple[str, str], list[Row]]) -> list[str]:
    """One line for each method and sentence, of the first model that has it."""
    found: dict[tuple[str, str], list[str]] = {}
    for (name, _), (row, *_) in groups.items():
        before = {(level, reason) for level, reason, _ in row["told"][MERGED]["skipped"]}
        for arm in _BOTH:
            for level, reason, _ in row["told"][arm]["skipped"]:
                if (level, reason) not in before:
                    arms = found.setdefault((name, f"level {level}, {reason}"), [])
                    arms += [] if arm in arms else [arm]
    return [f"- *{name}*, {' and '.join(arms)}: {reason}." for (name, reason), arms in found.items()]
