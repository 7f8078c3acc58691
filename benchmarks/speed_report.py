"""The Markdown table and the plot of speed runs, from their records alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.report import markdown, new_figure
from benchmarks.speed_plan import CALL
from benchmarks.speed_summary import Figure, Summary, failures, summaries
from benchmarks.speed_variants import CONTROL, IDEAL, NO_ATTENTION

_NONE = "-"
_MARKS = {"tomesd": "X", "ours": "o", "downsample": "s", "hypertile": "^"}


def table(records: Sequence[dict[str, Any]]) -> str:
    """Markdown: of each record where it was made, an overview of its cases, and every case in detail."""
    return "\n\n".join(_section(record) for record in records)


def _section(record: dict[str, Any]) -> str:
    cases = summaries(record)
    shown = [case for case in cases if case.figures]
    parts = [_heading(record)]
    if len(shown) > 1:  # a table of calls and one of pictures, which compare other variants
        kinds = [[case for case in shown if (case.case["what"] == CALL) == calls] for calls in (True, False)]
        parts += [_overview(kind) for kind in kinds if kind]
    parts += [_detail(case) for case in shown]
    timed = [row["case"] for row in record["rows"] if "seconds" in row]
    parts += [f"Not printed, because its control ({CONTROL}) is missing: {case.key}."
              for case in cases if not case.figures and case.case in timed]  # fmt: skip
    parts += [f"Failed: {where}: {reason}." for where, reason in failures(record).items()]
    if record["missing"]:
        parts.append("Not measured yet: " + "; ".join(record["missing"]) + ".")
    return "\n\n".join(parts)


def _heading(record: dict[str, Any]) -> str:
    device, chosen = record["device"], record["settings"]
    more = {"memory_gib": "GiB", "threads": "thread" if device.get("threads") == 1 else "threads"}
    where = ", ".join([device["name"], *(f"{device[field]} {unit}" for field, unit in more.items() if field in device)])
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items() if version)
    clock = "CUDA events" if device["kind"] == "cuda" else "processor time"
    tiny = " **Tiny models: a rehearsal, no measurement.**" if chosen["tiny_models"] else ""
    variants = "\n".join(f"- {name}: {meaning}" for name, meaning in chosen["variants"].items())
    made = f"{record['created'][:10]}, {chosen['dtype']}, {clock}, commit {record['commit']}; {versions}"
    return (f"## {where}\n\n{made}; `{record['command']}`.{tiny} Medians of rounds in which every variant takes its "
            f"turn.\n\n{variants}")


def _overview(cases: list[Summary]) -> str:
    """A line a case: the control's time, and how many times as fast each variant is."""
    others = [name for name in dict.fromkeys(name for case in cases for name in case.figures) if name != CONTROL]
    return markdown(["case", CONTROL, *others], (
        [case.key, _time(case.figures.get(CONTROL, Figure())),
         *(_factor_or_time(case.figures.get(name, Figure())) for name in others)]
        for case in cases
    ))  # fmt: skip


def _factor_or_time(figure: Figure) -> str:
    """The factor; the time where the control itself ran out of memory."""
    return _number(figure.factor, "{:.2f}x") if figure.factor and not figure.failed else _time(figure)


def _detail(case: Summary) -> str:
    columns = {
        "time": _time,
        "from .. to": lambda figure: _spread(figure.times),
        "speed-up": lambda figure: _number(figure.factor, "{:.2f}x"),
        "finest blocks": lambda figure: _seconds(figure.block_times),
        "their speed-up": lambda figure: _number(figure.block_factor, "{:.2f}x"),
        "share of ideal": lambda figure: _number(figure.of_ideal, "{:.0%}"),
        f"share of {NO_ATTENTION}": lambda figure: _number(figure.of_no_attention, "{:.0%}"),
        "roofline": lambda figure: _NONE if figure.bound is None else _one_time(figure.bound),
        "share of roofline": lambda figure: _number(figure.of_bound, "{:.0%}"),
        "peak beyond the model": lambda figure: _number(figure.peak_mib, "{:,.0f} MiB"),
        "kernels": lambda figure: _number(figure.kernels, "{:,}"),
        "operators": lambda figure: _number(figure.operators, "{:,}"),
    }
    cells = {head: [show(figure) for figure in case.figures.values()] for head, show in columns.items()}
    kept = [head for head, values in cells.items() if set(values) != {_NONE}]
    lines = ([name, *(cells[head][index] for head in kept)] for index, name in enumerate(case.figures))
    rounds = f"{case.rounds} round{'s' * (case.rounds > 1)}."
    return "\n\n".join([f"### {case.key}", markdown(["", *kept], lines), f"{rounds}{_bounds(case)}"])


def _bounds(case: Summary) -> str:
    """What the roofline says of unmerged and of merged, where the case has one."""
    unmerged = case.figures.get(CONTROL, Figure()).bound
    merged = {name: figure.bound for name, figure in case.figures.items()
              if figure.bound and name not in (CONTROL, IDEAL, NO_ATTENTION)}  # fmt: skip
    if not unmerged or not merged:
        return ""
    best = min(merged, key=merged.get)
    return (f" Roofline, computed from products at {case.rates['operations'] / 1e12:.3g} TFLOP/s and their bytes at "
            f"{case.rates['bytes'] / 1e9:.3g} GB/s, both measured here in this run: unmerged {_one_time(unmerged)}, "
            f"merged {_one_time(merged[best])} ({best}), so that where both are reached merging is "
            f"{unmerged / merged[best]:.2f}x as fast.")  # fmt: skip


def _number(value: float | None, form: str) -> str:
    return _NONE if value is None else form.format(value)


def _time(figure: Figure) -> str:
    return figure.failed or _seconds(figure.times)


def _seconds(times: Sequence[float]) -> str:
    return _one_time(median(times)) if times else _NONE


def _spread(times: Sequence[float]) -> str:
    return f"{_one_time(min(times))} .. {_one_time(max(times))}" if times else _NONE


def _one_time(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.3g} ms"


def plot(records: Sequence[dict[str, Any]], path: Path) -> None:
    """A PNG: a panel for each kind of case; speed-up over the picture's size, or bars where there is one size."""
    panels: dict[str, list[Summary]] = {}
    for record in records:
        for case in summaries(record):
            if any(figure.factor for figure in case.figures.values()):
                where = f"{record['device']['name']}, {record['settings']['dtype']}"
                title = case.key.replace(f"{case.case['pixels']} px ", "")
                panels.setdefault(f"{title}\n{where}", []).append(case)
    columns = min(3, max(1, len(panels)))
    rows = max(1, -(-len(panels) // columns))
    figure = new_figure(6 * columns, 4 * rows)
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axis, (title, cases) in zip(axes, panels.items(), strict=False):
        axis.set_title(title, fontsize=9)
        (_bars if len({case.case["pixels"] for case in cases}) == 1 else _lines)(axis, cases)
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    figure.savefig(path, dpi=100)


def _lines(axis: Any, cases: list[Summary]) -> None:
    cases = sorted(cases, key=lambda case: case.case["pixels"])
    names = dict.fromkeys(name for case in cases for name in case.figures)
    for name in names:
        points = [(case.case["pixels"], case.figures[name].factor) for case in cases
                  if name in case.figures and case.figures[name].factor]  # fmt: skip
        style = "--" if name in (CONTROL, IDEAL, NO_ATTENTION) else "-"
        mark = _MARKS.get(name.split(",")[0], ".")
        axis.plot(*zip(*points, strict=True), style, marker=mark, label=name)
    axis.set(xlabel="picture, px", ylabel="times as fast as the control", xticks=[c.case["pixels"] for c in cases])
    axis.legend(fontsize=8)


def _bars(axis: Any, cases: list[Summary]) -> None:
    """Of the call, and of the finest level's blocks where those were timed."""
    figures = cases[-1].figures
    names = [name for name in figures if figures[name].factor]
    axis.barh(names, [figures[name].factor for name in names], height=0.6, label=cases[-1].case["what"])
    blocks = [name for name in names if figures[name].block_factor and name != NO_ATTENTION]
    if blocks:
        axis.plot([figures[name].block_factor for name in blocks], blocks, "kD", label="finest level's blocks alone")
        axis.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=2)
    axis.axvline(1, color="grey", linewidth=0.8)
    axis.invert_yaxis()
    axis.set(xlabel="times as fast as the control")
