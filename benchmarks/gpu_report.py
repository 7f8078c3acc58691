"""What the rows of ``benchmarks.gpu`` say: two sentences, a table, and a sheet."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.models import BLOCK
from benchmarks.report import ABSENT, markdown, new_figure, number

_PAYS = 1.03  # times as fast; what is less is lost among a card's clocks
_CALLS, _STEPS = ("unmerged", "tomesd", "new", "renewed", "kept"), ("unmerged", "tomesd", "balanced", "max")
_WIDTH, _LINES = 190, 30  # of the text that the sheet has room for
TINY = "Tiny models on a CPU, to see that the command works: this says nothing of a card. "

Rows = Sequence[dict[str, Any]]


def cases(rows: Rows) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Case, such as ``sd15 1024 px`` -> figures of its calls, by name, and of its 20 steps; empty if there are none."""
    of = {row["key"]: row.get("of", {}) for row in rows}
    return {key.replace("call, ", ""): (found, of.get(key.replace("call", "sampling of 20 steps"), {}))
            for key, found in of.items() if " call, " in key}  # fmt: skip


def calls_table(rows: Rows) -> str:
    on_card = any("card_ms" in one for of, _ in cases(rows).values() for one in of.values())
    shown = [name for name in _CALLS if name != "new"]
    heads = [f"{name}, ms{' (of the card)' if on_card else ''}" for name in shown]
    return markdown(("", *heads, "20 steps: unmerged, tomesd, `balanced`, `max`, s"), (
        (case, *(_time(of.get(name, {})) for name in shown),
         ", ".join(f"{steps[one]['ms'] / 1e3:.2f}" for one in _STEPS if one in steps) or ABSENT)
        for case, (of, steps) in cases(rows).items()
    ))  # fmt: skip


def _time(of: dict[str, Any]) -> str:
    return number(of.get("ms"), ".0f") + (f" ({of['card_ms']:.0f})" if "card_ms" in of else "")


def factors(rows: Rows) -> dict[str, float]:
    """Case -> how many times as fast ``balanced`` is in 20 steps, else in a renewed and a kept call; of whole UNets."""
    found = {}
    for case, (of, steps) in cases(rows).items():
        if case.startswith(BLOCK):
            continue
        if {"unmerged", "balanced"} <= steps.keys():
            found[case] = steps["unmerged"]["ms"] / steps["balanced"]["ms"]
        elif {"unmerged", "renewed", "kept"} <= of.keys():
            found[case] = of["unmerged"]["ms"] / mean(of[when]["ms"] for when in ("renewed", "kept"))
    return found


def verdict(record: dict[str, Any]) -> str:
    """Two sentences: where merging pays on this card, and where it does not."""
    where, found = record["device"]["name"], factors(record["rows"])
    if not found:
        return f"Nothing measured yet says where merging pays on {where}. The same command goes on."
    gains, losses = (", ".join(f"{case} ({factor:.2f}x as fast)" for case, factor in found.items()
                               if (factor >= _PAYS) == pays) for pays in (True, False))  # fmt: skip
    return (f"On {where} merging by `balanced` pays for {gains or 'nothing that was measured'}. "
            + (f"It does not pay for {losses}." if losses else "There is nothing for which it does not pay."))


def table(records: Sequence[dict[str, Any]]) -> str:
    """Markdown: of each record what the device is, its verdict, all calls, laws, and what failed."""
    text = []
    for record in records:
        failed = [f"Failed: {row['key']}: {name}: {why}." for row in record["rows"]
                  for name, why in row.get("failed", {}).items()]  # fmt: skip
        missing = [f"Not measured yet: {'; '.join(record['missing'])}."] if record["missing"] else []
        text += [f"## {record['device']['name']}", *_told(record), calls_table(record["rows"]), *failed, *missing]
    return "\n\n".join(text)


def _told(record: dict[str, Any]) -> list[str]:
    """Verdict, versions, and what the rows say that time nothing."""
    facts = {row["key"]: {name: value for name, value in row.items() if name not in ("key", "of", "failed")}
             for row in record["rows"]}  # fmt: skip
    return [f"{TINY * record['settings']['tiny_models']}{verdict(record)}", f"versions: {_facts(record['versions'])}.",
            *(f"{key}: {_facts(found)}." for key, found in facts.items() if found)]  # fmt: skip


def _facts(told: Any) -> str:
    if isinstance(told, dict):
        return "; ".join(f"{name}: {_facts(value)}" for name, value in told.items())
    if isinstance(told, bool) or told is None:
        return {True: "yes", False: "no", None: "none"}[told]
    return f"{told:.3g}" if isinstance(told, float) else " ".join(str(told).split())


def plot(records: Sequence[dict[str, Any]], path: Path) -> None:
    """The sheet of the first record: how many times as fast 20 steps and calls are, the verdict, and what holds."""
    record = records[0]
    found = cases(record["rows"])
    figure = new_figure(14, 6 + len(found))
    figure.suptitle(f"Token merging on {record['device']['name']}, torch {record['versions']['torch']}", fontsize=15)
    axes = figure.subplot_mosaic("ab;cc", height_ratios=(2 + len(found), 4))
    _bars(axes["a"], "20 steps", _STEPS, {case: steps for case, (_, steps) in found.items() if steps})
    _bars(axes["b"], "a call", _CALLS, {case: of for case, (of, _) in found.items()})
    axes["c"].axis("off")
    lines = [line for one in _told(record) for line in (*textwrap.wrap(one.replace("$", r"\$"), _WIDTH), "")]
    axes["c"].text(0, 1, "\n".join(lines[:_LINES]), va="top", fontsize=9)
    figure.savefig(path, dpi=100)


def _bars(axis: Any, title: str, names: Sequence[str], of: dict[str, dict[str, Any]]) -> None:
    height = 0.8 / len(names)
    for place, name in enumerate(names):
        there = {case: one for case, one in enumerate(of.values()) if {name, "unmerged"} <= one.keys()}
        bars = axis.barh([case + place * height for case in there],
                         [one["unmerged"]["ms"] / one[name]["ms"] for one in there.values()], height, label=name)
        axis.bar_label(bars, [f" {one[name]['ms']:,.0f} ms" for one in there.values()], fontsize=7)
    axis.set(title=f"{title}, times as fast as unmerged", yticks=range(len(of)), yticklabels=list(of))
    axis.invert_yaxis()
    axis.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.06), ncols=len(names))
