"""Two sentences, a table and a sheet from the rows of ``benchmarks.gpu``."""

import textwrap
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.models import BLOCK
from benchmarks.report import ABSENT, markdown, new_figure, number
from benchmarks.timing import OURS

_PAYS = 1.03  # times as fast; less is lost among a card's clocks
_CALLS, _STEPS = ("unmerged", "tomesd", "renewed", "kept"), ("unmerged", "tomesd", "balanced", "max")
_MERGED = _CALLS[2:]
_WIDTH, _LINES = 190, 30  # of the text that the sheet has room for
TINY = "Tiny models on a CPU, to see that the command works: this says nothing of a card. "

Rows = Sequence[dict[str, Any]]


def cases(rows: Rows) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Map cases with a row of calls, as ``sd15 512 px``, to a pair: figures of calls, figures of 20 steps.

    Figures: name, such as "unmerged" -> a dict with ``ms``; {} if the row failed or there is none. rows: of a result.
    """
    figures = {row["key"]: row.get("of", {}) for row in rows}
    return {key.replace("call, ", ""): (of_calls, figures.get(key.replace("call", "sampling of 20 steps"), {}))
            for key, of_calls in figures.items() if " call, " in key}  # fmt: skip


def calls_table(rows: Rows) -> str:
    """Make the Markdown table: ms of calls (and the GPU's own, if known), s of 20 steps. A case has a line, and one for
    each way of "way, renewed" and "way, kept".
    """
    on_card = any("card_ms" in figures for of, _ in cases(rows).values() for figures in of.values())
    heads = [f"{name}, ms{' (of the card)' if on_card else ''}" for name in _CALLS]
    timed = [name for name in _STEPS if any(name in steps for _, steps in cases(rows).values())]
    in_steps = ", ".join(name if name in _CALLS else f"`{name}`" for name in timed or _STEPS)
    lines = []
    for case, (of, steps) in cases(rows).items():
        spent = ", ".join(f"{steps[name]['ms'] / 1e3:.2f}" for name in timed if name in steps) or ABSENT
        lines.append((case, *(_time(of.get(name, {})) for name in _CALLS), spent))
        for way in (name.removesuffix(", kept") for name in of if name.endswith(", kept")):
            lines.append((f"{case}, {way}", *(_time(of.get(f"{way}, {name}", {})) for name in _CALLS), ABSENT))
    return markdown(("", *heads, f"20 steps: {in_steps}, s"), lines)


def kernel_lines(rows: Rows) -> list[str]:
    """List for each case what our kernels take of the GPU's time in merged calls, together and each, if it is known."""
    lines = []
    for case, (of, _) in cases(rows).items():
        parts = []
        for name in (name for name in _MERGED if "kernels_us" in of.get(name, {})):
            ours = {kernel: us for kernel, us in of[name]["kernels_us"].items() if kernel in OURS}
            each, spent = ", ".join(f"{kernel} {us:,.0f}" for kernel, us in ours.items()), sum(ours.values()) / 1e3
            whole = of[name]["card_ms"]
            parts.append(f"{name} {spent:.2f} of {whole:.1f} ms, {spent / whole:.0%} (us: {each or ABSENT})")
        lines += [f"{case}, our kernels: {'; '.join(parts)}."] if parts else []
    return lines


def _time(of: dict[str, Any]) -> str:
    """Format a call's time in whole ms: ``ms`` or n/a, and in parentheses ``card_ms``, the GPU's own, if any."""
    return number(of.get("ms"), ".0f") + (f" ({of['card_ms']:.0f})" if "card_ms" in of else "")


def factors(rows: Rows) -> dict[str, float]:
    """Map cases, except the block's, to how many times as fast ``balanced`` is as unmerged; leave out cases not timed.

    The times are those of 20 steps if there are any, else of calls: the mean of a renewed and a kept one.
    """
    by_case = {}
    for case, (of, steps) in cases(rows).items():
        if case.startswith(BLOCK):  # which is no whole UNet
            continue
        if {"unmerged", "balanced"} <= steps.keys():
            by_case[case] = steps["unmerged"]["ms"] / steps["balanced"]["ms"]
        elif {"unmerged", "renewed", "kept"} <= of.keys():
            by_case[case] = of["unmerged"]["ms"] / mean(of[when]["ms"] for when in ("renewed", "kept"))
    return by_case


def verdict(record: dict[str, Any]) -> str:
    """Say for which cases ``balanced`` pays, at `_PAYS` times as fast or more, for which not, or that none is timed."""
    card, by_case = record["device"]["name"], factors(record["rows"])
    if not by_case:
        return f"Nothing measured yet says when merging pays on {card}. The same command goes on."
    gains, losses = (", ".join(f"{case} ({factor:.2f}x as fast)" for case, factor in by_case.items()
                               if (factor >= _PAYS) == pays) for pays in (True, False))  # fmt: skip
    return (f"On {card} merging by `balanced` pays for {gains or 'nothing that was measured'}. "
            + (f"It does not pay for {losses}." if losses else "There is nothing for which it does not pay."))


def table(records: Sequence[dict[str, Any]]) -> str:
    """Make the Markdown of results, a section each: device, `_facts_of`, `calls_table`, failed and missing rows."""
    text = []
    for record in records:
        failed = [f"Failed: {row['key']}: {name}: {why}." for row in record["rows"]
                  for name, why in row.get("failed", {}).items()]  # fmt: skip
        missing = [f"Not measured yet: {'; '.join(record['missing'])}."] if record["missing"] else []
        text += [f"## {record['device']['name']}", *_facts_of(record), calls_table(record["rows"]), *failed, *missing]
    return "\n\n".join(text)


def _facts_of(record: dict[str, Any]) -> list[str]:
    """List sentences of a result: where merging pays, versions, `kernel_lines`, and facts but times and failures."""
    facts = {row["key"]: {name: value for name, value in row.items() if name not in ("key", "of", "failed")}
             for row in record["rows"]}  # fmt: skip
    return [f"{TINY * record['settings']['tiny_models']}{verdict(record)}", f"versions: {_facts(record['versions'])}.",
            *kernel_lines(record["rows"]),
            *(f"{key}: {_facts(values)}." for key, values in facts.items() if values)]  # fmt: skip


def _facts(value: Any) -> str:
    """Format a JSON value: a dict as ``name: value; ...``, a bool as yes or no, None as none, a float in 3 digits."""
    if isinstance(value, dict):
        return "; ".join(f"{name}: {_facts(inner)}" for name, inner in value.items())
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "none"}[value]
    return f"{value:.3g}" if isinstance(value, float) else " ".join(str(value).split())


def plot(records: Sequence[dict[str, Any]], path: Path) -> None:
    """Write a PNG of the first result alone: bars of speed-ups, then facts. Raises ImportError without matplotlib."""
    record = records[0]
    by_case = cases(record["rows"])
    figure = new_figure(14, 6 + len(by_case))
    figure.suptitle(f"Token merging on {record['device']['name']}, torch {record['versions']['torch']}", fontsize=15)
    axes = figure.subplot_mosaic("ab;cc", height_ratios=(2 + len(by_case), 4))
    _bars(axes["a"], "20 steps", _STEPS, {case: steps for case, (_, steps) in by_case.items() if steps})
    _bars(axes["b"], "a call", _CALLS, {case: of for case, (of, _) in by_case.items()})
    axes["c"].axis("off")
    lines = [line for fact in _facts_of(record) for line in (*textwrap.wrap(fact.replace("$", r"\$"), _WIDTH), "")]
    axes["c"].text(0, 1, "\n".join(lines[:_LINES]), va="top", fontsize=9)
    figure.savefig(path, dpi=100)


def _bars(axis: Any, title: str, names: Sequence[str], of: dict[str, dict[str, Any]]) -> None:
    """Draw bars of unmerged ms over a name's ms, for cases that time both. of: case -> name -> a dict with ``ms``."""
    height = 0.8 / len(names)
    for place, name in enumerate(names):
        timed = {case: by_name for case, by_name in enumerate(of.values()) if {name, "unmerged"} <= by_name.keys()}
        bars = axis.barh([case + place * height for case in timed],
                         [by_name["unmerged"]["ms"] / by_name[name]["ms"] for by_name in timed.values()],
                         height, label=name)  # fmt: skip
        axis.bar_label(bars, [f" {by_name[name]['ms']:,.0f} ms" for by_name in timed.values()], fontsize=7)
    axis.set(title=f"{title}, times as fast as unmerged", yticks=range(len(of)), yticklabels=list(of))
    axis.invert_yaxis()
    axis.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.06), ncols=len(names))
