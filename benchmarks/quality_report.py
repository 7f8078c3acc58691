"""The tables and the plot of quality results, from their JSON alone; ``python -m benchmarks.report`` finds this."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

from benchmarks import report, subjects
from benchmarks.quality_figures import ROLES, Mean, NoiseMeans, PictureMeans, Section, at_equal_time, sections
from benchmarks.results import Record

LEGEND = """\
Work: the share of the finest self-attention's products (queries times keys) that is left, counted while the rows were
measured and averaged over their steps; of a transformer all of it, text and skipped blocks too. Gap: rise of the
held-out v-loss; dev: squared distance of the prediction from the unmerged one; both in % of the unmerged v-loss, on the
same pictures, noise and times. PSNR and SSIM: whole pictures beside the unmerged ones of equal seeds. Detail: their
gradient energy as a share of the unmerged ones', below 1 where they are washed out. Time: processor time of all calls
of the network for a picture, and of its dearest step, as a share of unmerged calls, taken in turns on one thread; of
this model, at this size. ±: standard error over pictures. "Reference" methods are plain code of the benchmark, written
for clarity and not for speed; "engine" is tome_core; "diffusers" what that brings; **tomesd** is tomesd itself. Sorted
by work, then by error. Strength at equal time: on lines between the presets and strengths that were measured, as far as
none of them beats another in time and PSNR; n/a where none is as fast."""
_ABSENT = "n/a"
_NO_POINT = (None,) * 4  # no strength is as fast
MARKERS, COLOURS = "osDv^<>pPXhd", [f"C{number}" for number in range(10)]
TICKS = {1 / 64: "1/64", 1 / 16: "1/16", 1 / 10: "1/10", 1 / 4: "1/4", 1 / 2: "1/2", 1: "1"}
STYLES = {"control": {"color": "firebrick", "linestyle": "--"}, "yardstick": {"color": "grey", "linestyle": ":"}}
Columns = dict[str, tuple[dict[str, Any], Callable[[Any], str]]]  # head -> figures by variant, and how they are written


def table(records: list[Record]) -> str:
    """Markdown: for every checkpoint the means, the same by time, the whole pictures, others at equal time."""
    parts = [text for record in records for text in (_origin(record), *_record_tables(record))]
    return "\n\n".join([LEGEND, *parts])


def _record_tables(record: Record) -> Iterator[str]:
    for section in sections(record):
        if section.noised:
            yield from _noised_tables(section, record["settings"])
        if section.pictures:
            yield _picture_table(section, record["settings"])
            yield from _at_equal_time(section)


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


def _noised_tables(section: Section, settings: dict[str, Any]) -> Iterator[str]:
    figures, times = section.noised, settings["times"]
    head = (f"### {section.checkpoint}: {section.counts['noised']} noised pictures, "
            f"unmerged v-loss {section.loss:.5f}")  # fmt: skip
    order = _order(section, figures, lambda one: one.dev.value)
    yield f"{head}\n\n" + _table(section, order, {
        "work": (figures, _work), "gap %": (figures, lambda one: _mean(one.gap)), "dev %": (figures, _dev),
    })  # fmt: skip
    for what in ("dev", "gap"):
        columns: Columns = {
            f"t = {time}": (figures, lambda one, i=i, what=what: _mean(getattr(one, f"{what}_at")[i]))
            for i, time in enumerate(times)
        }
        yield f"#### {section.checkpoint}: {what} % by time\n\n{_table(section, order, columns)}"


def _picture_table(section: Section, settings: dict[str, Any]) -> str:
    figures = section.pictures
    order = _order(section, figures, lambda one: -one.psnr.value)
    columns: Columns = {
        "work": (figures, _work),
        "dev %": (section.noised, _dev),
        "PSNR dB": (figures, lambda one: _mean(one.psnr)),
        "SSIM": (figures, lambda one: _mean(one.ssim)),
        "detail": (figures, lambda one: _mean(one.detail)),
        "time": (figures, lambda one: _share(one.time)),
        "dearest step": (figures, lambda one: _share(one.dearest)),
    }
    head = f"### {section.checkpoint}: {section.counts['pictures']} whole pictures, {settings['steps']} solver steps"
    return f"{head}{_manner(settings)}\n\n{_table(section, order, columns)}"


def _at_equal_time(section: Section) -> Iterator[str]:
    rows = [
        (section.variants[one.name]["method"], section.variants[one.name]["setting"], f"{one.theirs.time:.2f}",
         *(", ".join(_ABSENT if value is None else f"{value:.4g}" for value in pair)
           for pair in zip(one.theirs[1:], (one.ours or _NO_POINT)[1:], strict=True)))
        for one in at_equal_time(section)
    ]  # fmt: skip
    if rows:
        drawn = report.markdown(("method", "setting", "time", "PSNR dB: it, strength", "SSIM", "dev %"), rows, left=2)
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


def _table(section: Section, order: list[str], columns: Columns) -> str:
    """Without the columns that no variant has figures for, as those of older results."""
    cells = {head: [write(figures[name]) if name in figures else _ABSENT for name in order]
             for head, (figures, write) in columns.items()}  # fmt: skip
    cells = {head: many for head, many in cells.items() if set(many) != {_ABSENT}}
    rows = []
    for number, name in enumerate(order):
        one = section.variants[name]
        method = {"tomesd": f"**{one['method']}**", "method": one["method"]}.get(one["role"])
        method = method or f"*{one['method']}* ({one['role']})"
        rows.append([method, one["setting"], one["code"], *(many[number] for many in cells.values())])
    return report.markdown(["method", "setting", "code", *cells], rows, left=3)


def _work(one: NoiseMeans | PictureMeans) -> str:
    return f"{one.work:.3g}"


def _dev(one: NoiseMeans) -> str:
    return _mean(one.dev)


def _share(share: float | None) -> str:
    return _ABSENT if share is None else f"{share:.2f}"


def _mean(mean: Mean | None) -> str:
    """As many decimals as the error has two digits for."""
    if mean is None:
        return _ABSENT
    if not math.isfinite(mean.value):
        return "equal"
    if mean.error is None:
        return f"{mean.value:.3g}"
    decimals = 3 if mean.error == 0 else min(5, max(1, 1 - math.floor(math.log10(mean.error))))
    return f"{mean.value:.{decimals}f} ± {mean.error:.{decimals}f}"


# what a row of panels shows: its label, figures by variant, the error of one, and the scale
PANELS = (
    ("dev, % of the unmerged v-loss", lambda section: section.noised, lambda one: one.dev, "log"),
    ("PSNR to the unmerged pictures, dB", lambda section: section.pictures, lambda one: one.psnr, "linear"),
)


def plot(records: list[Record], path: Path) -> None:
    """Error over attention work left, one line a method: measures below each other, checkpoints side by side."""
    columns = [section for record in records for section in sections(record)]
    panels = [panel for panel in PANELS if any(panel[1](section) for section in columns)]
    methods = dict.fromkeys(one["method"] for section in columns for one in section.variants.values()
                            if one["role"] == "method")  # fmt: skip
    # twelve markers and ten colours: sixty pairs before one comes again
    looks = {method: {"color": colour, "marker": marker}
             for method, colour, marker in zip(methods, cycle(COLOURS), cycle(MARKERS), strict=False)}  # fmt: skip
    looks["tomesd"] = {"color": "black", "marker": "*", "markersize": 11, "linewidth": 2.5, "zorder": 5}
    figure = report.new_figure(3 + 5.5 * max(1, len(columns)), 1 + 4.5 * len(panels))
    axes = figure.subplots(len(panels), len(columns), squeeze=False, sharey="row")
    for row, (label, figures, error, scale) in zip(axes, panels, strict=True):
        for axis, section in zip(row, columns, strict=True):
            points = {name: (one.work, error(one)) for name, one in figures(section).items()}
            _draw_panel(axis, section, points, looks)
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


def _draw_panel(
    axis: Any, section: Section, points: dict[str, tuple[float, Mean]], looks: dict[str, dict[str, Any]]
) -> None:
    """points: work and error of each variant. Controls and yardsticks are lines across."""
    lines: dict[str, list[tuple[float, Mean]]] = {}
    beside = cycle((0.01, 0.28, 0.6))  # labels of lines that nearly coincide stand beside each other
    for name, (work, error) in points.items():
        described = section.variants[name]
        if described["role"] in STYLES:
            style = STYLES[described["role"]]
            axis.axhline(error.value, linewidth=1, **style)
            axis.annotate(described["method"], (next(beside), error.value), xycoords=("axes fraction", "data"),
                          fontsize=7, va="bottom", color=style["color"])  # fmt: skip
        else:
            lines.setdefault(described["method"], []).append((work, error))
    for method, line in lines.items():
        works, means = zip(*sorted(line, key=lambda point: point[0]), strict=True)
        axis.errorbar(works, [mean.value for mean in means], [mean.error or 0 for mean in means], label=method,
                      capsize=2, **{"markersize": 6, "linewidth": 1.2, **looks[method]})  # fmt: skip
