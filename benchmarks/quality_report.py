"""The figures of quality results, their tables and their plot, from the JSON alone; `LEGEND` explains them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.report import ABSENT, markdown, new_figure, number
from benchmarks.results import Record
from benchmarks.subjects import CHOOSE
from benchmarks.variants import PLAIN
from demo.metrics import decibels

LEGEND = """\
Work: the share of the finest self-attention's products (queries times keys) that is left, counted while the rows were
measured and averaged over their steps; for a transformer all attention counts, with text and skipped blocks. Dev: the
squared distance of a noised picture's prediction from the unmerged one, in % of the unmerged v-loss, also at each
timestep t. PSNR: whole pictures compared with the unmerged ones of equal seeds. Detail: their gradient energy as a
share of the unmerged ones', below 1 if they are washed out. Time: processor time of all calls of the network for a
picture, as a share of unmerged calls, taken in turns on one thread, for this model and size. ±: standard error over
pictures. "Reference" methods are plain code of the benchmark, written for clarity and not for speed; "engine" is
tome_core; "diffusers" is diffusers' own; **tomesd** is tomesd itself. Rows are sorted by work, then by error. Strength
at equal time: on lines between the presets and strengths that were measured and that no other one beats in time and
PSNR; n/a if none is as fast."""
ROLES = ("tomesd", "method", "control", "yardstick")
OURS = ("preset", "strength")
_NO_DETAIL = 1e-6  # the energy of a picture without detail, in squared steps of 255
_MARKERS = "osDv^<>pPXhd"
_TICKS = {1 / 64: "1/64", 1 / 16: "1/16", 1 / 10: "1/10", 1 / 4: "1/4", 1 / 2: "1/2", 1: "1"}
_STYLES = {"control": {"color": "firebrick", "linestyle": "--"}, "yardstick": {"color": "grey", "linestyle": ":"}}
Parts = dict[int, dict[str, Any]]  # rows of one variant


class Mean(NamedTuple):
    """A mean over pictures and its standard error, which is None for one picture or an infinite value."""

    value: float
    error: float | None

    @classmethod
    def of(cls, values: np.ndarray) -> Mean:
        """Make the mean and its standard error from an array with one value a picture."""
        count = len(values)
        spread = float(np.std(values, ddof=1)) / math.sqrt(count) if count > 1 and np.isfinite(values).all() else None
        return cls(float(np.mean(values)), spread)

    def __str__(self) -> str:
        """Format the mean and its error, which gets two digits; an infinite PSNR is ``equal``."""
        if not math.isfinite(self.value):
            return "equal"
        if self.error is None:
            return f"{self.value:.3g}"
        decimals = 3 if self.error == 0 else min(5, max(1, 1 - math.floor(math.log10(self.error))))
        return f"{self.value:.{decimals}f} ± {self.error:.{decimals}f}"


class Noised(NamedTuple):
    """Figures of noised pictures: `work` left, `dev` in % of the unmerged v-loss, and the same at each timestep."""

    work: float  # the share of the unmerged attention's products that is left
    dev: Mean  # the squared distance of the prediction from the unmerged one, in % of the unmerged v-loss
    dev_at: tuple[Mean, ...]  # the same at each of the result's timesteps


class Pictured(NamedTuple):
    """Figures of whole pictures: `work`, `psnr` in dB, `detail` and `time` as shares of unmerged, None if not known."""

    work: float  # as in `Noised`
    psnr: Mean  # dB
    detail: Mean | None = None  # gradient energy as a share of the unmerged picture's, the geometric mean
    time: float | None = None  # the time of all calls of a picture, as a share of the unmerged ones


class Section(NamedTuple):
    """One checkpoint's figures: unmerged v-`loss` (None without noised), `counts`, and by variant facts and figures."""

    checkpoint: str
    loss: float | None  # the unmerged v-loss; None without noised pictures
    counts: dict[str, int]  # of pictures: "noised" and "pictures"
    variants: dict[str, dict[str, Any]]  # as `Variant.describe` gives them
    noised: dict[str, Noised]
    pictures: dict[str, Pictured]

    def work(self, name: str) -> float:
        """Return the share of attention's products that a variant leaves, in its noised pictures if it has any."""
        return (self.noised.get(name) or self.pictures[name]).work


def sections(record: Record) -> list[Section]:
    """Compute the figures of each checkpoint of a result of kind "quality", finished or not."""
    return [_section(record, checkpoint) for checkpoint in record["settings"]["models"]]


def _section(record: Record, checkpoint: str) -> Section:
    """Compute a result's figures for the checkpoint named `checkpoint`, from that checkpoint's rows alone.

    The figures on noised and on whole pictures are by the variants' names; the unmerged variant is their reference.
    """
    parts_of: dict[str, dict[str, Parts]] = {"noised": {}, "pictures": {}}
    for row in record["rows"]:
        if row["checkpoint"] == checkpoint:
            parts_of[row["measure"]].setdefault(row["variant"], {})[row["part"]] = row
    plain = {measure: by_variant.get(PLAIN, {}) for measure, by_variant in parts_of.items()}
    variants = {variant["name"]: variant for variant in record["settings"]["variants"]}
    losses = _over(plain["noised"], "loss") if plain["noised"] else np.empty((0, 0))
    counts = {"noised": losses.shape[1],
              "pictures": sum(len(row["squared_error"]) for row in plain["pictures"].values())}  # fmt: skip
    loss = float(losses.mean()) if losses.size else None
    noised, pictures = ({name: parts_of[measure][name] for name in variants if name != PLAIN
                         and name in parts_of[measure]} for measure in parts_of)  # fmt: skip
    return Section(checkpoint, loss, counts, variants, {name: _noised(parts, loss) for name, parts in noised.items()},
                   {name: _pictured(parts, {part: plain["pictures"][part] for part in parts})
                    for name, parts in pictures.items()})  # fmt: skip


def _over(parts: Parts, name: str, axis: int = -1) -> np.ndarray:
    """Join field `name` of a variant's rows to an array, in the order of the parts, along the axis of pictures."""
    return np.concatenate([np.array(parts[part][name]) for part in sorted(parts)], axis)


def _noised(parts: Parts, loss: float) -> Noised:
    """Compute a variant's mean work, and ``dev`` in % of `loss`, averaged over all times and at each time.

    `parts` holds one row per part, whose ``dev`` has a value for each time; work and each `Mean` are over the parts.
    """
    dev = 100 / loss * _over(parts, "dev")
    work = float(np.mean([row["work"] for row in parts.values()]))
    return Noised(work, Mean.of(dev.mean(0)), tuple(Mean.of(at) for at in dev))


def _pictured(parts: Parts, plain: Parts) -> Pictured:
    """Compute figures from a variant's rows and the same parts' unmerged rows, by part; None for a figure they lack."""
    def all_have(name: str) -> bool:
        return all(name in row for row in parts.values())

    errors = _over(parts, "squared_error")
    work = float(np.average([row["work"] for row in parts.values()],
                            weights=[len(row["squared_error"]) for row in parts.values()]))  # fmt: skip
    psnr = Mean.of(np.array([decibels(error) for error in errors]))
    detail = _detail(_over(parts, "gradient"), _over(plain, "gradient")) if all_have("gradient") else None
    time = None
    if all_have("seconds"):
        steps = np.median(_over(parts, "seconds", 0) / _over(parts, "beside")[:, None], 0)
        time = float(steps.sum() / _over(plain, "seconds", 0).shape[1])
    return Pictured(work, psnr, detail, time)


def _detail(energies: np.ndarray, unmerged: np.ndarray) -> Mean:
    """Average ``energies / unmerged``, one value a picture, geometrically; _NO_DETAIL replaces lower ones in both."""
    logs = Mean.of(np.log(np.maximum(energies, _NO_DETAIL) / np.maximum(unmerged, _NO_DETAIL)))
    share = math.exp(logs.value)
    return Mean(share, None if logs.error is None else share * logs.error)


class Rival(NamedTuple):
    """A method of others, `name`. time: a share of the unmerged one. PSNR in dB: `theirs`, and `ours` at equal time,
    read between our timed strengths; the slowest's if the method is slower than all, None if no strength is as fast.
    """

    name: str
    time: float
    theirs: float
    ours: float | None


def at_equal_time(section: Section) -> Iterator[Rival]:
    """Yield for each timed method of others, in the result's order, its PSNR and our strength's at an equal time.

    Our PSNR lies on lines between the timed strengths that no other beats in time and PSNR. It is None if none is as
    fast; for a method slower than all of them it is the slowest strength's. Without timed strengths there is nothing.
    """
    points = {name: (figures.time, figures.psnr.value) for name, figures in section.pictures.items()
              if figures.time is not None}  # fmt: skip
    ours = {name for name in points if section.variants[name]["method"] in OURS}
    front: list[tuple[float, float]] = []  # by rising time, each with a higher PSNR than those before it
    for time, psnr in sorted((points[name] for name in ours), key=lambda point: (point[0], -point[1])):
        if not front or psnr > front[-1][1]:
            front.append((time, psnr))
    for name, (time, psnr) in points.items():
        if front and name not in ours and section.variants[name]["role"] in ("method", "tomesd"):
            # to a slower method the slowest strength compares
            yield Rival(name, time, psnr, float(np.interp(time, *zip(*front, strict=True)))
                        if time >= front[0][0] else None)  # fmt: skip


def table(records: list[Record]) -> str:
    """Make Markdown: `LEGEND`, then each result's origin and, by checkpoint, all variants and others at equal time."""
    return "\n\n".join([LEGEND, *(text for record in records for text in (_origin(record), *_tables(record)))])


def _origin(record: Record) -> str:
    """Describe a result's command, versions and device; warn if its purpose is `CHOOSE`, or if rows are missing."""
    versions = ", ".join(f"{name} {value}" for name, value in record["versions"].items() if value)
    device = ", ".join(f"{name} {value}" if name in ("cores", "threads") else str(value)
                       for name, value in record["device"].items() if name != "kind")  # fmt: skip
    lines = [f"`{record['command']}`, {record['created'][:10]}, commit {record.get('commit')}; {versions}; {device}."]
    if record["settings"].get("for") == CHOOSE:
        lines.append("**Pictures to choose by**, which are not those of the README's tables.")
    if record["missing"]:
        lines.append(f"**Unfinished: {len(record['missing'])} rows are missing.**")
    return "\n".join(lines)


def _tables(record: Record) -> Iterator[str]:
    """Yield a table of all variants for each checkpoint, and after it a table of others' methods at equal time, if any.

    The columns are dev and, if the result is to choose by, dev at each timestep, else PSNR, detail and time.
    """
    settings = record["settings"]
    for section in sections(record):
        noised, pictures = section.noised, section.pictures
        columns = {"dev %": {name: str(figures.dev) for name, figures in noised.items()}}
        if settings.get("for") == CHOOSE:
            for place, time in enumerate(settings["times"]):
                columns[f"t = {time}"] = {name: str(figures.dev_at[place]) for name, figures in noised.items()}
        else:
            columns |= {"PSNR dB": {name: str(figures.psnr) for name, figures in pictures.items()},
                        "detail": {name: str(figures.detail or ABSENT) for name, figures in pictures.items()},
                        "time": {name: number(figures.time, ".2f") for name, figures in pictures.items()}}  # fmt: skip
        counted = []
        if noised:
            counted.append(f"{section.counts['noised']} noised pictures, unmerged v-loss {section.loss:.5f}")
        if pictures:
            more = (settings.get("schedule"), settings.get("guidance") and f"guidance {settings['guidance']:g}")
            counted.append(", ".join(filter(None, (f"{section.counts['pictures']} whole pictures",
                                                   f"{settings['steps']} solver steps", *more))))  # fmt: skip
        yield f"### {section.checkpoint}: {'; '.join(counted)}\n\n{_table(section, columns)}"
        rows = [(section.variants[rival.name]["method"], section.variants[rival.name]["setting"], f"{rival.time:.2f}",
                 f"{rival.theirs:.4g}, {number(rival.ours, '.4g')}") for rival in at_equal_time(section)]  # fmt: skip
        if rows:
            drawn = markdown(("method", "setting", "time", "PSNR dB: it, strength"), rows, left=2)
            yield f"#### {section.checkpoint}: others beside strength at equal time\n\n{drawn}"


def _table(section: Section, columns: dict[str, dict[str, str]]) -> str:
    """Make a table: methods, then controls, then yardsticks, each by falling work, and of equal work by rising error.

    columns: head -> variant -> cell, n/a if it lacks the variant; a column without values is left out.
    """
    def place(name: str) -> tuple:
        role = max(1, ROLES.index(section.variants[name]["role"]))
        error = section.noised[name].dev.value if name in section.noised else -section.pictures[name].psnr.value
        return role, -round(section.work(name), 4), error

    columns = {head: cells for head, cells in columns.items() if set(cells.values()) - {ABSENT}}
    rows = []
    for name in sorted(section.noised | section.pictures, key=place):
        variant = section.variants[name]
        method = {"tomesd": f"**{variant['method']}**", "method": variant["method"]}.get(variant["role"])
        method = method or f"*{variant['method']}* ({variant['role']})"
        cells = (by_variant.get(name, ABSENT) for by_variant in columns.values())
        rows.append([method, variant["setting"], variant["code"], f"{section.work(name):.3g}", *cells])
    return markdown(["method", "setting", "code", "work", *columns], rows, left=3)


def plot(records: list[Record], path: Path) -> None:
    """Write a PNG: a panel a checkpoint, of dev, else PSNR, over work left. Raises ImportError without matplotlib."""
    columns = [section for record in records for section in sections(record)]
    figure = new_figure(3 + 5.5 * max(1, len(columns)), 5.5)
    for axis, section in zip(figure.subplots(1, max(1, len(columns)), squeeze=False)[0], columns, strict=True):
        points = ({name: (figures.work, figures.dev) for name, figures in section.noised.items()}
                  or {name: (figures.work, figures.psnr) for name, figures in section.pictures.items()})  # fmt: skip
        lines: dict[str, list[tuple[float, Mean]]] = {}
        for name, (work, error) in points.items():
            variant = section.variants[name]
            if style := _STYLES.get(variant["role"]):
                axis.axhline(error.value, label=variant["method"], linewidth=1, **style)
            else:
                lines.setdefault(variant["method"], []).append((work, error))
        for place, (method, line) in enumerate(lines.items()):
            works, means = zip(*sorted(line, key=lambda point: point[0]), strict=True)
            axis.errorbar(works, [figure.value for figure in means], [figure.error or 0 for figure in means],
                          label=method, capsize=2, linewidth=1.2, marker=_MARKERS[place % len(_MARKERS)])  # fmt: skip
        axis.set(xscale="log", yscale="log" if section.noised else "linear", xlabel="attention work left",
                 ylabel="dev, % of the unmerged v-loss" if section.noised else "PSNR, dB", title=section.checkpoint)
        axis.set_xticks(list(_TICKS), _TICKS.values())
        axis.minorticks_off()
        axis.grid(alpha=0.3, which="both")
        axis.legend(fontsize=6, loc="lower left")
    figure.savefig(path, dpi=110)
