"""The tables of `benchmarks.unfused`: peak memory, time, and the largest picture that fits, from its rows alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from benchmarks.report import markdown
from benchmarks.results import Record
from benchmarks.unfused_hosts import HEADS, SOURCES
from tome_core import preset

_MEMORIES = (2, 4, 8, 16)  # GiB, of which the largest picture is told
_STEPS = range(951, 0, -50)  # timesteps of a picture of 20 steps
_SHOWN = {"unmerged": "unmerged", "tomesd": "tomesd .5", "merged": "merged"}
_EXPLAINED = """\
One block of Stable Diffusion 1.5's finest level, one picture, float32, one CPU thread, processor time; merged is preset
{preset}: the time of a picture's 20 steps' mean, of which half keep a match, the memory of the dearest. Figures with *
are told from one and two of the {heads} heads, those with ** from the two next smaller pictures (what grows with the
tokens, and with their square). The hosts' functions were told that {free:g} GiB are free, by which most of them cut
their work: what those take is what they are told, and merging saves time."""

Figures = tuple[float, float, str]  # peak MiB, seconds, how they were come by: "", "*" or "**"


def table(records: Sequence[Record]) -> str:
    """Markdown."""
    made, rows = records[0], [row for record in records for row in record["rows"]]
    found = figures(rows, made["settings"]["preset"])
    head = ["attention", "pixels", *(f"{one}, peak MiB" for one in _SHOWN.values()), "merged is",
            *(f"{one}, s" for one in _SHOWN.values()), "merged is"]  # fmt: skip
    lines = ([source, str(pixels), *_cells([found.get((source, pixels, one)) for one in _SHOWN])]
             for source, pixels in dict.fromkeys((source, pixels) for source, pixels, _ in found))  # fmt: skip
    text = [
        _EXPLAINED.format(**made["settings"], heads=HEADS),
        markdown(head, lines, " --- "),
        "The largest square picture, in pixels a side, whose block fits into so much memory, by what does not cut its "
        "work to fit, from the largest two sizes of each:\n\n" + _largest(found),
        "\n".join(f"- *{name}*: {SOURCES[name].meaning}." for name in dict.fromkeys(source for source, *_ in found)),
        "\n".join(f"- failed: {row['key']}: {row['failed']}" for row in rows if "failed" in row),
        f"{made['device']['name']}; {made['command']}; commit {made['commit']}.",
    ]
    return "\n\n".join(part for part in text if part)


def figures(rows: Sequence[Mapping[str, Any]], name: str) -> dict[tuple[str, int, str], Figures]:
    """(source, pixels, one of unmerged, tomesd and merged) -> its figures. name: of the preset."""
    cases: dict[tuple[str, int, str], dict[int, Mapping[str, Any]]] = {}
    for row in rows:
        if "failed" not in row:
            cases.setdefault((row["source"], row["pixels"], row["what"]), {})[row["heads"]] = row
    whole = {key: _of_all_heads(by_heads) for key, by_heads in cases.items()}
    noisy = fmean(step >= (preset(name).early_until if preset(name).early_ratio is not None else math.inf)
                  for step in _STEPS)  # fmt: skip
    found = {key: one for key, one in whole.items() if key[2] in _SHOWN}
    for source, pixels, what in whole:
        early, late = (whole.get((source, pixels, one)) for one in ("early", "late"))
        if what == "late" and early is not None:
            seconds = noisy * early[1] + (1 - noisy) * late[1]
            found[source, pixels, "merged"] = max(early[0], late[0]), seconds, max(early[2], late[2])
    return dict(sorted({**_compute(found), **found}.items(), key=lambda item: (list(SOURCES).index(item[0][0]),
                                                                                 item[0][1])))  # fmt: skip


def _of_all_heads(by_heads: dict[int, Mapping[str, Any]]) -> Figures:
    values = {heads: (row["peak_mib"], fmean(row["seconds"].values())) for heads, row in by_heads.items()}
    if HEADS in values:
        return *values[HEADS], ""
    (few, low), (more, high) = sorted(values.items())[0], sorted(values.items())[-1]
    if few == more:
        return low[0], math.nan, "*"
    each = [(then - at) / (more - few) for at, then in zip(low, high, strict=True)]
    # no head takes less than nothing: where the peak is no score's, it differs by chance
    return *(max(at, then) + (HEADS - more) * max(0.0, one) for at, then, one in zip(low, high, each, strict=True)), "*"


def _compute(found: dict[tuple[str, int, str], Figures]) -> dict[tuple[str, int, str], Figures]:
    """Figures at sizes that did not fit, where two smaller ones were measured."""
    sizes = {pixels for _, pixels, _ in found}
    new = {}
    for source, what in {(source, what) for source, _, what in found}:
        curves = [_curve(found, source, what, figure) for figure in (0, 1)]
        for pixels in sizes if all(curves) else ():
            if (source, pixels, what) not in found:
                new[source, pixels, what] = *(_peak(curve, (pixels // 8) ** 2) for curve in curves), "**"
    return new


def _curve(
    found: dict[tuple[str, int, str], Figures], source: str, what: str, figure: int = 0
) -> tuple[float, float] | None:
    """MiB, or seconds, a token and a pair of tokens, from the two largest sizes that were measured.

    None where there is one size alone, where a function cuts its work to fit, and where it grew by less than the tokens
    did: such figures follow no curve.
    """
    known = sorted((pixels, one[figure]) for (name, pixels, which), one in found.items()
                   if (name, which) == (source, what) and one[2] != "**")[-2:]  # fmt: skip
    if len(known) < 2 or SOURCES[source].at_once is None:
        return None
    (n, low), (m, high) = (((pixels // 8) ** 2, value) for pixels, value in known)
    pair = (high / m - low / n) / (m - n)
    return (low / n - pair * n, pair) if pair >= 0 else None


def _peak(curve: tuple[float, float], tokens: float) -> float:
    return curve[0] * tokens + curve[1] * tokens**2


def largest(curve: tuple[float, float], mib: float) -> int:
    """The side in pixels, a multiple of 64, of the largest square picture whose peak is within so many MiB."""
    side = 0
    while _peak(curve, ((side + 64) / 8) ** 2) <= mib and side < 2**16:
        side += 64
    return side


def _largest(found: dict[tuple[str, int, str], Figures]) -> str:
    lines = []
    for source, what in dict.fromkeys((source, what) for source, _, what in found):
        curve = _curve(found, source, what)
        if curve:
            lines.append([source, _SHOWN[what], *(str(largest(curve, size * 1024)) for size in _MEMORIES)])
    return markdown(["attention", "", *(f"{size} GiB" for size in _MEMORIES)], lines, " --- ")


def _cells(three: list[Figures | None]) -> list[str]:
    unmerged, _, merged = three
    peaks = ["-" if one is None else f"{one[0]:,.0f}{one[2]}" for one in three]
    seconds = ["-" if one is None or math.isnan(one[1]) else f"{one[1]:.2f}{one[2]}" for one in three]
    if unmerged is None or merged is None:
        return [*peaks, "-", *seconds, "-"]
    factor = unmerged[1] / merged[1]
    times = "-" if math.isnan(factor) else f"{factor:.1f} times as fast"
    return [*peaks, f"{merged[0] / unmerged[0]:.0%} of unmerged", *seconds, times]
