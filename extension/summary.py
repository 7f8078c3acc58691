"""What is told of a job: a line for people, and data for API callers."""

from __future__ import annotations

from typing import Any

from ..tome_core.hosting import Report, count
from .merging import Job
from .wish import FIRST, HIRES

_NAMES = {False: FIRST, True: HIRES}


def line_of(job: Job, has_hires: bool) -> str:
    """One line on a job that was on."""
    passes = (False, True) if has_hires else (False,)
    told = [", ".join([_outcome(job, hires, has_hires), *_beside(job, hires)]) for hires in passes]
    if has_hires:
        told = [f"{_NAMES[hires]}: {text}" for hires, text in zip(passes, told, strict=True)]
    return "; ".join([*told, *(f"left out: {sentence}" for sentence in job.wish.left_out)])


def data_of(job: Job, has_hires: bool) -> dict[str, Any]:
    """The same for programs. merged: did anything; passes: the reports, by pass, of those that ran with us."""
    reports = {hires: Report.join(record.reports) for hires, record in job.records.items() if record.reports}
    return {
        "merged": any(one.merged_anything for one in reports.values()), "line": line_of(job, has_hires),
        "passes": {_NAMES[hires]: {"steps": job.records[hires].steps, **one.as_data()}
                   for hires, one in reports.items()},
    }  # fmt: skip


def _outcome(job: Job, hires: bool, has_hires: bool) -> str:
    if job.config(hires) is None:
        return _why_off(job, has_hires)
    record = job.records.get(hires)
    if record is None:
        return "did not run"
    whole = Report.join(record.reports)
    why = list(dict.fromkeys([*record.refusals, *whole.notes]))
    if whole.merged_anything:
        steps = count(record.steps, "step")
        live = "" if record.steps_live == record.steps else f"{record.steps_live} of "
        return ", ".join([live + steps, whole.headline, *why])
    if why and not whole.reasons:
        return f"nothing merged: {', '.join(why)}"
    return whole.headline if record.reports else "nothing merged: the model was not called"


def _beside(job: Job, hires: bool) -> list[str]:
    """What became of the webui's own merging."""
    ratio = job.built_in(hires)
    if not ratio:
        return []
    own = f"the webui's own merging ({ratio:g})"
    return [f"{own} stays on" if job.why_left(hires) else f"{own} is silent in this pass"]


def _why_off(job: Job, has_hires: bool) -> str:
    if not job.wish.strength:
        return "strength 0, left alone"
    if job.wish.where == HIRES and not has_hires:
        return "left alone, because only the hires pass is to merge, and there is none"
    return "left alone"
