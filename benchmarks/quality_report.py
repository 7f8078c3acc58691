"""The tables and the plot of quality results, from their JSON alone."""

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
measured and averaged over their steps; for a transformer all attention counts, with text and skipped blocks. Gap: rise
of the held-out v-loss; dev: squared distance of the prediction from the unmerged one; both in % of the unmerged v-loss,
on the same pictures, noise and times. PSNR and SSIM: whole pictures compared with the unmerged ones of equal seeds.
Detail: their gradient energy as a share of the unmerged ones', below 1 if they are washed out. Time: processor time of
all calls of the network for a picture, as a share of unmerged calls, taken in turns on one thread, for this model and
size. ±: standard error over pictures. "Reference" methods are plain code of the benchmark, written for clarity and not
for speed; "engine" is tome_core; "diffusers" is diffusers' own; **tomesd** is tomesd itself. Rows are sorted by work,
then by error. Strength at equal time: on lines between the presets and strengths that were measured and that no other
one beats in time and PSNR; n/a if none is as fast."""
MARKERS = "osDv^<>pPXhd"
TICKS = {1 / 64: "1/64", 1 / 16: "1/16", 1 / 10: "1/10", 1 / 4: "1/4", 1 / 2: "1/2", 1: "1"}
STYLES = {"control": {"color": "firebrick", "linestyle": "--"}, "yardstick": {"color": "grey", "linestyle": ":"}}


def table(records: list[Record]) -> str:
    """Make the Markdown: for each checkpoint the means, the same by time, the whole pictures, others at equal time."""
    return "\n\n".join([LEGEND, *(text for record in records for text in (_origin(record), *_tables(record)))])


def _origin(record: Record) -> str:
    """Describe a result's command, versions and device, and what to beware of: its purpose, missing rows."""
    versions = ", ".join(f"{name} {value}" for name, value in record["versions"].items() if value)
    device = ", ".join(f"{name} {value}" if name in ("cores", "threads") else str(value)
                       for name, value in record["device"].items() if name != "kind")  # fmt: skip
    lines = [f"`{record['command']}`, {record['created'][:10]}, commit {record.get('commit')}; {versions}; {device}."]
    if record["settings"].get("for") == subjects.CHOOSE:
        lines.append("**Pictures to choose by**, which are not those of the README's tables.")
    if record["missing"]:
        lines.append(f"**Unfinished: {len(record['missing'])} rows are missing.**")
    return "\n".join(lines)


def _tables(record: Record) -> Iterator[str]:
    """Make each checkpoint's headed tables, as far as it has noised pictures and whole ones."""
    settings = record["settings"]
    for section in sections(record):
        noised, pictures, name = section.noised, section.pictures, section.checkpoint
        dev = {variant: mean(figures.dev) for variant, figures in noised.items()}
        if noised:
            order = _order(section, noised, lambda figures: figures.dev.value)
            columns = {"work": {variant: f"{figures.work:.3g}" for variant, figures in noised.items()},
                       "gap %": {variant: mean(figures.gap) for variant, figures in noised.items()},
                       "dev %": dev}  # fmt: skip
            yield (f"### {name}: {section.counts['noised']} noised pictures, unmerged v-loss {section.loss:.5f}\n\n"
                   + _table(section, order, columns))  # fmt: skip
            by_time = {f"t = {time}": {variant: mean(figures.dev_at[place]) for variant, figures in noised.items()}
                       for place, time in enumerate(settings["times"])}  # fmt: skip
            yield f"#### {name}: dev % by time\n\n{_table(section, order, by_time)}"
        if pictures:
            order = _order(section, pictures, lambda figures: -figures.psnr.value)
            columns = {"work": {variant: f"{figures.work:.3g}" for variant, figures in pictures.items()}, "dev %": dev}
            for head, field in (("PSNR dB", "psnr"), ("SSIM", "ssim"), ("detail", "detail")):
                columns[head] = {variant: mean(getattr(figures, field)) for variant, figures in pictures.items()}
            columns["time"] = {variant: number(figures.time, ".2f") for variant, figures in pictures.items()}
            more = (settings.get("schedule"), settings.get("guidance") and f"guidance {settings['guidance']:g}")
            manner = ", ".join(filter(None, (f"{settings['steps']} solver steps", *more)))
            yield (f"### {name}: {section.counts['pictures']} whole pictures, {manner}\n\n"
                   + _table(section, order, columns))  # fmt: skip
            yield from _at_equal_time(section)


def _at_equal_time(section: Section) -> Iterator[str]:
    rows = [(section.variants[rival.name]["method"], section.variants[rival.name]["setting"], f"{rival.time:.2f}",
             f"{rival.theirs:.4g}, {number(rival.ours, '.4g')}") for rival in at_equal_time(section)]  # fmt: skip
    if rows:
        drawn = markdown(("method", "setting", "time", "PSNR dB: it, strength"), rows, left=2)
        yield f"#### {section.checkpoint}: others beside strength at equal time\n\n{drawn}"


def _order(section: Section, figures: dict[str, Any], error: Callable[[Any], float]) -> list[str]:
    """Sort variants' names: methods by falling work, then by rising error, then the controls, then the yardsticks.

    Every table has all yardsticks, also those without figures.
    """
    def place(name: str) -> tuple:
        role = max(1, ROLES.index(section.variants[name]["role"]))
        return (role, -round(figures[name].work, 4), error(figures[name])) if name in figures else (role, 0, 0)

    return sorted((name for name, variant in section.variants.items()
                   if name in figures or variant["role"] == "yardstick"), key=place)  # fmt: skip


def _table(section: Section, order: list[str], columns: dict[str, dict[str, str]]) -> str:
    """Make a table of the variants in this order. columns: head -> variant -> cell; one without values is left out."""
    columns = {head: cells for head, cells in columns.items() if set(cells.values()) - {ABSENT}}
    rows = []
    for name in order:
        variant = section.variants[name]
        method = {"tomesd": f"**{variant['method']}**", "method": variant["method"]}.get(variant["role"])
        method = method or f"*{variant['method']}* ({variant['role']})"
        cells = (by_variant.get(name, ABSENT) for by_variant in columns.values())
        rows.append([method, variant["setting"], variant["code"], *cells])
    return markdown(["method", "setting", "code", *columns], rows, left=3)


def mean(figure: Mean | None) -> str:
    """Format a mean and its error, which gets two digits; None is n/a, and an infinite PSNR is ``equal``."""
    if figure is None:
        return ABSENT
    if not math.isfinite(figure.value):
        return "equal"
    if figure.error is None:
        return f"{figure.value:.3g}"
    decimals = 3 if figure.error == 0 else min(5, max(1, 1 - math.floor(math.log10(figure.error))))
    return f"{figure.value:.{decimals}f} ± {figure.error:.{decimals}f}"


def plot(records: list[Record], path: Path) -> None:
    """Write a PNG of dev, or PSNR without noised pictures, over the work left: a line for each method.

    Controls and yardsticks are lines across.
    """
    columns = [section for record in records for section in sections(record)]
    figure = new_figure(3 + 5.5 * max(1, len(columns)), 5.5)
    for axis, section in zip(figure.subplots(1, max(1, len(columns)), squeeze=False)[0], columns, strict=True):
        points = ({name: (figures.work, figures.dev) for name, figures in section.noised.items()}
                  or {name: (figures.work, figures.psnr) for name, figures in section.pictures.items()})  # fmt: skip
        lines: dict[str, list[tuple[float, Mean]]] = {}
        for name, (work, error) in points.items():
            variant = section.variants[name]
            if style := STYLES.get(variant["role"]):
                axis.axhline(error.value, label=variant["method"], linewidth=1, **style)
            else:
                lines.setdefault(variant["method"], []).append((work, error))
        for place, (method, line) in enumerate(lines.items()):
            works, means = zip(*sorted(line, key=lambda point: point[0]), strict=True)
            axis.errorbar(works, [figure.value for figure in means], [figure.error or 0 for figure in means],
                          label=method, capsize=2, linewidth=1.2, marker=MARKERS[place % len(MARKERS)])  # fmt: skip
        axis.set(xscale="log", yscale="log" if section.noised else "linear", xlabel="attention work left",
                 ylabel="dev, % of the unmerged v-loss" if section.noised else "PSNR, dB",
                 title=section.checkpoint)  # fmt: skip
        axis.set_xticks(list(TICKS), TICKS.values())
        axis.minorticks_off()
        axis.grid(alpha=0.3, which="both")
        axis.legend(fontsize=6, loc="lower left")
    figure.savefig(path, dpi=110)
