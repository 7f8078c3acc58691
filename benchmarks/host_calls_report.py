"""The table of `benchmarks.host_calls`, from its rows alone."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, median
from typing import Any

from benchmarks.host_inside import BUILT_IN, OURS, THEIRS, UNMERGED
from benchmarks.report import ABSENT, markdown, number
from benchmarks.results import Record
from tome_core import preset

HEAD = ("attention", "pixels", "rounds", "unmerged, s", "built-in, s", "renewed, s", "kept, s", "mean of 20 steps, s",
        "built-in, times as fast", "ours, times as fast", "peak MiB: unmerged, built-in, ours")  # fmt: skip
_EXPLAINED = """\
Calls of a whole UNet of Stable Diffusion 1.5's shape with random weights, both halves of guidance at once, float32,
processor seconds on one CPU thread, medians of so many rounds. Built-in: what the host brings along, ComfyUI's
TomePatchModel at {ComfyUI}, as it starts, and A1111's token merging (tomesd) at {A1111}. Renewed, kept: ours, preset
{preset}, in an early and a late step that make a match, and in an early and a late one that keep it; the mean: of a
picture's 20 uniform steps, of which {early:.0%} are early and half keep a match, by which ours is so many times as
fast. Peak: beyond the model, the highest of the calls. The hosts were told that {free:g} GiB are free, by which some
functions cut their work."""


def table(records: Sequence[Record]) -> str:
    """Markdown."""
    made, all_rows = records[0], [row for record in records for row in record["rows"]]
    flags = {row["attention"]: f"{row['host']} {row['version']}{row['flag'] and ' ' + row['flag']}, torch "
             f"{row['torch']}: `{row['function']}`" for row in all_rows if "failed" not in row}  # fmt: skip
    failed = {**{row["key"]: row["failed"] for row in all_rows if "failed" in row},
              **{f"{row['key']}, {arm}": why for row in all_rows for arm, why in row.get("failed_arms", {}).items()}}
    text = [
        _EXPLAINED.format(**made["settings"], **THEIRS, early=share_of_early(made["settings"]["preset"])),
        markdown(HEAD, rows(records)),
        "\n".join(f"- *{name}*: {meaning}." for name, meaning in flags.items()),
        "\n".join(f"- failed: {name}: {why}" for name, why in failed.items()),
        f"{made['device']['name']}; {made['command']}; commit {made['commit']}.",
    ]
    return "\n\n".join(part for part in text if part)


def rows(records: Sequence[Record]) -> list[list[str]]:
    """The cells of the table, below `HEAD`."""
    early = share_of_early(records[0]["settings"]["preset"])
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in (row for record in records for row in record["rows"] if "failed" not in row):
        groups.setdefault((row["attention"], str(row["pixels"])), []).append(row)
    return [[*name, *figures(group, early)] for name, group in groups.items()]


def share_of_early(name: str) -> float:
    """Of a picture's 20 uniform steps, of which a preset of this name merges so many as early ones."""
    config = preset(name)
    return 0.0 if config.early_ratio is None else fmean(step >= config.early_until for step in range(951, 0, -50))


def figures(rows: Sequence[dict[str, Any]], early: float) -> list[str]:
    """The cells of rows of one attention and size. early: the share of such steps."""
    spent = {name: _median([row["seconds"][name] for row in rows]) for name in rows[0]["seconds"]}
    plain, theirs, (early_new, early_kept, late_new, late_kept) = spent[UNMERGED], spent[BUILT_IN], map(spent.get, OURS)
    mean = None if None in map(spent.get, OURS) else (
        early * fmean((early_new, early_kept)) + (1 - early) * fmean((late_new, late_kept)))  # fmt: skip
    factors = (None if None in (plain, merged) else plain / merged for merged in (theirs, mean))
    peaks = (_median([row["peak_mib"][arm] for row in rows]) for arm in rows[0]["peak_mib"])
    seconds = ((plain,), (theirs,), (early_new, late_new), (early_kept, late_kept), (mean,))
    return [str(len(rows)),
            *(ABSENT if None in several else ", ".join(f"{value:.3g}" for value in several) for several in seconds),
            *(number(factor, ".2f") for factor in factors),
            ", ".join(number(None if peak is None else max(0, peak), ",.0f") for peak in peaks)]  # fmt: skip


def _median(values: Sequence[float | None]) -> float | None:
    """None if a value is missing."""
    return None if None in values else median(values)
