"""The tables and the plot of quality results, from their JSON alone; ``python -m benchmarks.report`` finds this."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
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
MARKERS = "osDv^<>pPXhd"
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
            columns = {"work": {variant: f"{one.work:.3g}" for variant, one in noised.items()},
                       "gap %": {variant: mean(one.gap) for variant, one in noised.items()}, "dev %": dev}  # fmt: skip
            yield (f"### {name}: {section.counts['noised']} noised pictures, unmerged v-loss {section.loss:.5f}\n\n"
                   + _table(section, order, columns))  # fmt: skip
            by_time = {f"t = {time}": {variant: mean(one.dev_at[place]) for variant, one in noised.items()}
                       for place, time in enumerate(settings["times"])}  # fmt: skip
            yield f"#### {name}: dev % by time\n\n{_table(section, order, by_time)}"
        if pictures:
            order = _order(section, pictures, lambda one: -one.psnr.value)
            columns = {"work": {variant: f"{one.work:.3g}" for variant, one in pictures.items()}, "dev %": dev} | {
                head: {variant: mean(getattr(one, field)) for variant, one in pictures.items()}
                for head, field in (("PSNR dB", "psnr"), ("SSIM", "ssim"), ("detail", "detail"))
            } | {"time": {variant: number(one.time, ".2f") for variant, one in pictures.items()}}
            told = (settings.get("schedule"), settings.get("guidance") and f"guidance {settings['guidance']:g}")
            manner = ", ".join(filter(None, (f"{settings['steps']} solver steps", *told)))
            yield (f"### {name}: {section.counts['pictures']} whole pictures, {manner}\n\n"
                   + _table(section, order, columns))  # fmt: skip
            yield from _at_equal_time(section)


def _at_equal_time(section: Section) -> Iterator[str]:
    rows = [(section.variants[one.name]["method"], section.variants[one.name]["setting"], f"{one.time:.2f}",
             f"{one.theirs:.4g}, {number(one.ours, '.4g')}") for one in at_equal_time(section)]  # fmt: skip
    if rows:
        drawn = markdown(("method", "setting", "time", "PSNR dB: it, strength"), rows, left=2)
        yield f"#### {section.checkpoint}: others beside strength at equal time\n\n{drawn}"


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


def plot(records: list[Record], path: Path) -> None:
    """Dev, else PSNR, over attention work left, one line a method; controls and yardsticks are lines across."""
    columns = [section for record in records for section in sections(record)]
    figure = new_figure(3 + 5.5 * max(1, len(columns)), 5.5)
    for axis, section in zip(figure.subplots(1, max(1, len(columns)), squeeze=False)[0], columns, strict=True):
        points = ({name: (one.work, one.dev) for name, one in section.noised.items()}
                  or {name: (one.work, one.psnr) for name, one in section.pictures.items()})  # fmt: skip
        lines: dict[str, list[tuple[float, Mean]]] = {}
        for name, (work, error) in points.items():
            one = section.variants[name]
            if style := STYLES.get(one["role"]):
                axis.axhline(error.value, label=one["method"], linewidth=1, **style)
            else:
                lines.setdefault(one["method"], []).append((work, error))
        for place, (method, line) in enumerate(lines.items()):
            works, means = zip(*sorted(line, key=lambda point: point[0]), strict=True)
            axis.errorbar(works, [one.value for one in means], [one.error or 0 for one in means], label=method,
                          capsize=2, linewidth=1.2, marker=MARKERS[place % len(MARKERS)])  # fmt: skip
        axis.set(xscale="log", yscale="log" if section.noised else "linear", xlabel="attention work left",
                 ylabel="dev, % of the unmerged v-loss" if section.noised else "PSNR, dB",
                 title=section.checkpoint)  # fmt: skip
        axis.set_xticks(list(TICKS), TICKS.values())
        axis.minorticks_off()
        axis.grid(alpha=0.3, which="both")
        axis.legend(fontsize=6, loc="lower left")
    figure.savefig(path, dpi=110)
