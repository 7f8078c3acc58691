"""The tables and the plot of quality results, from their JSON alone; ``python -m benchmarks.report`` finds this."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks import purposes, report
from benchmarks.quality_figures import ROLES, Mean, Noised, Pictures, Section, at_equal_time, sections
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
Columns = dict[str, tuple[dict[str, Any], Callable[[Any], str]]]  # head -> figures by variant, and how they are written


def table(records: list[Record]) -> str:
    """Markdown: for every checkpoint the means, the same by time, the whole pictures, others at equal time; Frechet."""
    parts = [text for record in records for text in (_origin(record), *_record_tables(record))]
    return "\n\n".join([LEGEND, *parts])


def _record_tables(record: Record) -> Iterator[str]:
    for section in sections(record):
        if section.noised:
            yield from _noised_tables(section, record["settings"])
        if section.pictures:
            yield _picture_table(section, record["settings"])
            yield from _at_equal_time(section)
    if record.get("frechet"):
        yield _frechet_table(record)


def _origin(record: Record) -> str:
    versions = ", ".join(f"{name} {value}" for name, value in record["versions"].items() if value)
    device = ", ".join(f"{name} {value}" if name in ("cores", "threads") else str(value)
                       for name, value in record["device"].items() if name != "kind")  # fmt: skip
    lines = [f"`{record['command']}`, {record['created'][:10]}, commit {record.get('commit')}; {versions}; {device}."]
    lines += [f"{note}." for note in record.get("notes", [])]
    if record["settings"].get("for") == purposes.CHOOSE:
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
        "LPIPS": (figures, lambda one: _mean(one.lpips)),
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


def _frechet_table(record: Record) -> str:
    kinds = {"plain_features": "plain features", "inception": "FID"}
    there = [kind for kind in kinds if any(kind in one for one in record["frechet"])]
    rows = ([one["checkpoint"], one["variant"], *(f"{one[kind]:.4g}" if kind in one else _ABSENT for kind in there)]
            for one in record["frechet"])  # fmt: skip
    head = "### Frechet distances to the unmerged pictures"
    return f"{head}\n\nPlain features: colours of 4x4 squares and Haar energies, not comparable with published FIDs." \
        "\n\n" + report.markdown(["checkpoint", "variant", *(kinds[kind] for kind in there)], rows)  # fmt: skip


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


def _work(one: Noised | Pictures) -> str:
    return f"{one.work:.3g}"


def _dev(one: Noised) -> str:
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


def plot(records: list[Record], path: Path) -> None:
    """Error over attention work left, a column of panels for each checkpoint."""
    from benchmarks import quality_plot

    columns = [section for record in records for section in sections(record)]
    width, height = quality_plot.size(columns)
    figure = report.new_figure(width, height)
    quality_plot.draw(figure, columns)
    figure.savefig(path, dpi=110)
