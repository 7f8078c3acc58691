"""The line after each job: what merged where, or why nothing did."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ..tome_core import Report
from ..tome_core.report import LevelReport
from .merging import Job, PassRecord


def line_of(job: Job, has_hires: bool) -> str:
    """One line on a job that was on."""
    if not has_hires:
        return _pass_text(job, False)
    names = {False: "first pass", True: "hires pass"}
    return "; ".join(f"{name}: {_pass_text(job, hires)}" for hires, name in names.items())


def _pass_text(job: Job, hires: bool) -> str:
    if job.wish.config(hires) is None:
        return "left alone" if job.is_on else _why_off(job)
    record = job.records.get(hires)
    if record is None:
        return "did not run"
    merged = _merged_text(record.reports)
    why = list(dict.fromkeys([*record.refusals, *_notes(record.reports)]))
    if merged:
        return ", ".join([merged, _steps_text(record), *_gains_text(record.reports), *why])
    return f"nothing merged: {', '.join(why or _reasons(record.reports) or ['the model was not called'])}"


def _why_off(job: Job) -> str:
    if any(job.wish.ratios):
        return "left alone, because only the hires pass is to merge, and there is none"
    return "ratio 0, left alone"


def _steps_text(record: PassRecord) -> str:
    plural = "" if record.steps == 1 else "s"
    if record.steps_live == record.steps:
        return f"{record.steps} step{plural}"
    return f"{record.steps_live} of {record.steps} step{plural}"


def _merged_text(reports: Sequence[Report]) -> str:
    """``level 0 (/1) 4096 -> 2048 tokens, 75% of its attention saved``, for each level."""
    parts = []
    for level in range(max((len(report.levels) for report in reports), default=0)):
        seen = [(report.calls, report.levels[level]) for report in reports if level < len(report.levels)]
        if any(one.calls_merged for _, one in seen):
            parts.append(f"level {level} (/{seen[0][1].downsample}){_level_text(seen)}")
    return ", ".join(parts)


def _level_text(seen: Sequence[tuple[int, LevelReport]]) -> str:
    """What merged at a level, of its passes' (calls of the UNet, report)."""
    kinds = dict.fromkeys(tokens for _, one in seen for tokens in one.tokens)
    mlp = dict.fromkeys(tokens for _, one in seen for tokens in one.mlp_tokens)
    weighed = [(calls, one.work_saved) for calls, one in seen if one.work_saved is not None]
    parts = [f" {', '.join(_tokens_text(*tokens) for tokens in kinds)} tokens"] if kinds else [""]
    if weighed and (kinds or not mlp):
        saved = sum(calls * share for calls, share in weighed) / sum(calls for calls, _ in weighed)
        parts.append(f", {saved:.0%} of its attention saved")
    if mlp:
        text = ", ".join(f"{before} -> {left}" for before, left in mlp)
        parts.append(f"{', ' if kinds else ' '}{text} in its MLP")
    return "".join(parts)


def _tokens_text(before: int, queries: int, keys: int) -> str:
    return f"{before} -> {queries if queries == keys else f'{queries} queries x {keys} keys'}"


def _reasons(reports: Sequence[Report]) -> list[str]:
    """Why calls were skipped, the most frequent first."""
    counted: Counter[str] = Counter()
    for report in reports:
        for level in report.levels:
            counted.update(level.reasons)
    return [reason.partition(": ")[2] for reason, _ in counted.most_common(3)]


def _gains_text(reports: Sequence[Report]) -> list[str]:
    """``1024x1536: about 31 % faster``, where that was measured."""
    return list(dict.fromkeys(f"measured {gain.line}" for report in reports for gain in report.gains))


def _notes(reports: Sequence[Report]) -> list[str]:
    return [note for report in reports for note in report.notes]
