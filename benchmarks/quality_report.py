"""The tables and the plot of quality results, from their JSON alone; ``python -m benchmarks.report`` finds this."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

from benchmarks import subjects
from benchmarks.quality_figures import ROLES, Mean, Section, at_equal_time, sections
from benchmarks.report import ABSENT, markdown, new_figure, number
from benchmarks.results import Record

LEGEND = """\
Work: the share of the finest self-attention's products (queries times keys) that is left, counted while the rows were
measured and averaged over their steps; of a transformer all of it, text and skipped blocks too. Gap: rise of the
held-out v-loss; dev: squared distance of the prediction from the unmerged one; both in % of the unmerged v-loss, on the
same pictures, noise and times. PSNR and SSIM: whole pictures beside the unmerged ones of equal seeds. Detail: their
gradient energy as a share of the unmerged ones', below 1 where they are washed out. Time: processor time of all calls
of the network for a picture, as a share of unmerged calls, taken in turns on one thread; of this model, at this size.
±: standard error over pictures. "Reference" methods are plain code of the benchmark, written for clarity and not for
speed; "engine" is tome_core; "diffusers" what that brings; **tomesd** is tomesd itself. Sorted by work, then by error.
Strength at equal time: on lines between the presets and strengths that were measured, as far as none of them beats
another in time and PSNR; n/a where none is as fast."""
MARKERS, COLOURS = "osDv^<>pPXhd", [f"C{number}" for number in range(10)]
TICKS = {1 / 64: "1/64", 1 / 16: "1/16", 1 / 10: "1/10", 1 / 4: "1/4", 1 / 2: "1/2", 1: "1"}
STYLES = {"control": {"color": "firebrick", "linestyle": "--"}, "yardstick": {"color": "grey", "linestyle": ":"}}


def table(records: list[Record]) -> str:
    """Markdown: for every checkpoint the means, the same by time, the whole pictures, others at equal time."""
    return "\n\n".join([LEGEND, *(text for record in records for text in (_origin(record), *_tables(record)))])


def _origin(record: Record) -> str:
    versions = ", ".join(f"{name} {value}" for name, value in record["versions"].items() if value)
    device = ", ".join(f"{name} {value}" if name in ("cores", "threads") else str(value)
                       for name, value in record["device"].items() if name != "kind")  # fmt: skip
    lines = [f"`{record['command']}`, {record['created'][:10]}, commit {record.get('commit')}; {versions}; {device}."]
    if record["settings"].get("for") == subjects.CHOOSE:
        lines.append("**Pictures to choose by**, which are not those that the README's tables show.")
    if record["missing"]:
        lines.append(f"**Unfinished: {len(record['missing'])} rows are missing.**")
    return "\n".join(lines)


def _tables(record: Record) -> Iterator[str]:
    settings = record["settings"]
    for section in sections(record):
        noised, pictures, name = section.noised, section.pictures, section.checkpoint
        dev = {variant: mean(one.dev) for variant, one in noised.items()}
        if noised:
            order = _order(section, noised, lambda one: one.dev.value)
            yield (f"### {name}: {section.counts['noised']} noised pictures, unmerged v-loss {section.loss:.5f}\n\n"
                   + _table(section, order, {"work": _works(noised), "gap %": {
                       variant: mean(one.gap) for variant, one in noised.items()}, "dev %": dev}))  # fmt: skip
            by_time = {f"t = {time}": {variant: mean(one.dev_at[place]) for variant, one in noised.items()}
                       for place, time in enumerate(settings["times"])}  # fmt: skip
            yield f"#### {name}: dev % by time\n\n{_table(section, order, by_time)}"
        if pictures:
            order = _order(section, pictures, lambda one: -one.psnr.value)
            columns = {"work": _works(pictures), "dev %": dev} | {
                head: {variant: mean(getattr(one, field)) for variant, one in pictures.items()}
                for head, field in (("PSNR dB", "psnr"), ("SSIM", "ssim"), ("detail", "detail"))
            } | {"time": {variant: number(one.time, ".2f") for variant, one in pictures.items()}}
            yield (f"### {name}: {section.counts['pictures']} whole pictures, {settings['steps']} solver steps"
                   f"{_manner(settings)}\n\n{_table(section, order, columns)}")  # fmt: skip
            yield from _at_equal_time(section)


def _at_equal_time(section: Section) -> Iterator[str]:
    rows = [(section.variants[one.name]["method"], section.variants[one.name]["setting"], f"{one.time:.2f}",
             f"{one.theirs:.4g}, {number(one.ours, '.4g')}") for one in at_equal_time(section)]  # fmt: skip
    if rows:
        drawn = markdown(("method", "setting", "time", "PSNR dB: it, strength"), rows, left=2)
        yield f"#### {section.checkpoint}: others beside strength at equal time\n\n{drawn}"


def _manner(settings: dict[str, Any]) -> str:
    """How the pictures were made, as far as the result says it."""
    schedule, guidance = settings.get("schedule"), settings.get("guidance")
    return (f", {schedule}" if schedule else "") + (f", guidance {guidance:g}" if guidance else "")


def _order(section: Section, figures: dict[str, Any], error: Callable[[Any], float]) -> list[str]:
    """Methods from much work to little and from good to bad, then the controls, then the yardsticks.

    A yardstick of another measure stands there without figures: no table is without its yardsticks.
    """
    def place(name: str) -> tuple:
        one = figures.get(name)
        role = max(1, ROLES.index(section.variants[name]["role"]))
        return (role, -round(one.work, 4), error(one)) if one else (role, 0, 0)

    absent = [name for name, one in section.variants.items() if one["role"] == "yardstick" and name not in figures]
    return sorted([*figures, *absent], key=place)


def _table(section: Section, order: list[str], columns: dict[str, dict[str, str]]) -> str:
    """Of cells by head and variant; without the columns that older results have no figures for."""
    columns = {head: cells for head, cells in columns.items() if set(cells.values()) - {ABSENT}}
    rows = []
    for name in order:
        one = section.variants[name]
        method = {"tomesd": f"**{one['method']}**", "method": one["method"]}.get(one["role"])
        method = method or f"*{one['method']}* ({one['role']})"
        rows.append([method, one["setting"], one["code"], *(cells.get(name, ABSENT) for cells in columns.values())])
    return markdown(["method", "setting", "code", *columns], rows, left=3)


def _works(figures: dict[str, Any]) -> dict[str, str]:
    return {name: f"{one.work:.3g}" for name, one in figures.items()}


def mean(of: Mean | None) -> str:
    """As many decimals as the error has two digits for."""
    if of is None:
        return ABSENT
    if not math.isfinite(of.value):
        return "equal"
    if of.error is None:
        return f"{of.value:.3g}"
    decimals = 3 if of.error == 0 else min(5, max(1, 1 - math.floor(math.log10(of.error))))
    return f"{of.value:.{decimals}f} ± {of.error:.{decimals}f}"


# what a row of panels shows: its label, the figures, the error of one, and the scale
PANELS = (("dev, % of the unmerged v-loss", "noised", "dev", "log"),
          ("PSNR to the unmerged pictures, dB", "pictures", "psnr", "linear"))  # fmt: skip


def plot(records: list[Record], path: Path) -> None:
    """Error over attention work left, one line a method: measures below each other, checkpoints side by side."""
    columns = [section for record in records for section in sections(record)]
    panels = [panel for panel in PANELS if any(getattr(section, panel[1]) for section in columns)]
    methods = dict.fromkeys(one["method"] for section in columns for one in section.variants.values())
    looks = dict(zip(methods, zip(cycle(COLOURS), cycle(MARKERS), strict=False), strict=False))
    figure = new_figure(3 + 5.5 * max(1, len(columns)), 1 + 4.5 * len(panels))
    axes = figure.subplots(len(panels), len(columns), squeeze=False, sharey="row")
    for row, (label, figures, error, scale) in zip(axes, panels, strict=True):
        for axis, section in zip(row, columns, strict=True):
            points = {name: (one.work, getattr(one, error)) for name, one in getattr(section, figures).items()}
            _draw(axis, section, points, looks)
            axis.set(xscale="log", yscale=scale, xlabel="attention work left", title=section.checkpoint)
            axis.set_xticks(list(TICKS), TICKS.values())
            axis.minorticks_off()
            axis.set_xlim(min(TICKS) * 0.8, 1.1)
            axis.grid(alpha=0.3, which="both")
        row[0].set_ylabel(label)
    named = [pair for axis in axes.flat for pair in zip(*axis.get_legend_handles_labels(), strict=True)]
    handles = {label: handle for handle, label in named}
    figure.legend(handles.values(), handles, loc="outside right upper", fontsize=8)
    figure.savefig(path, dpi=110)


def _draw(
    axis: Any, section: Section, points: dict[str, tuple[float, Mean]], looks: dict[str, tuple[str, str]]
) -> None:
    """points: work and error of each variant. Controls and yardsticks are lines across."""
    lines: dict[str, list[tuple[float, Mean]]] = {}
    beside = cycle((0.01, 0.28, 0.6))  # labels of lines that nearly coincide stand beside each other
    for name, (work, error) in points.items():
        described = section.variants[name]
        if style := STYLES.get(described["role"]):
            axis.axhline(error.value, linewidth=1, **style)
            axis.annotate(described["method"], (next(beside), error.value), xycoords=("axes fraction", "data"),
                          fontsize=7, va="bottom", color=style["color"])  # fmt: skip
        else:
            lines.setdefault(described["method"], []).append((work, error))
    for method, line in lines.items():
        works, means = zip(*sorted(line, key=lambda point: point[0]), strict=True)
        colour, marker = ("black", "*") if method == "tomesd" else looks[method]
        axis.errorbar(works, [one.value for one in means], [one.error or 0 for one in means], label=method,
                      capsize=2, linewidth=1.2, color=colour, marker=marker)  # fmt: skip
