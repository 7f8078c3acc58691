"""The report on a job: one or two lines for the user, and data for API callers."""

from typing import Any

from ..tome_core.hosting import count
from . import host
from .job_settings import HIRES, PASSES
from .merging import Job, PassRecord


def lines_of(job: Job, has_hires: bool) -> list[str]:
    """Return one or two lines: results of all passes; if any, hindrances, the webui's own merging and unused values."""
    outcomes, more = [], []
    for hires in PASSES if has_hires else (False,):
        record, ratio = job.records.get(hires), host.built_in_ratio(job.p(), hires)
        where = f"{PASSES[hires]}: " if has_hires else ""
        outcomes.append(where + _outcome(job, hires, has_hires))
        if record is not None:
            whole = record.report
            why = [*record.refusals, *whole.notes, whole.hindered] if whole.merged_anything else []
            more += [where + reason for reason in dict.fromkeys(filter(None, why))]
        if ratio:
            state = "stays on" if job.why_unmerged(hires) else "is off in this pass"
            more.append(f"{where}the webui's own merging ({ratio:g}) {state}")
    more += [f"not used: {sentence}" for sentence in job.settings.left_out]
    has_changes = job.settings.strength and job.settings.changes
    strength = f"strength {job.settings.strength:g}{', own settings' if has_changes else ''}"
    first = f"{strength}; {'; '.join(outcomes)}" if has_hires else f"{strength}, {outcomes[0]}"
    return [first, *(["; ".join(more)] if more else [])]


def data_of(job: Job, lines: list[str]) -> dict[str, Any]:
    """Return the report as JSON values, by name; "line" joins `lines`, from `lines_of` or the job's error.

    The fields are the same whatever happened. With an error, strength and where are None.
    """
    settings, is_read = job.settings, not job.error
    return {
        "merged": any(record.report.merged_anything for record in job.records.values()), "line": "; ".join(lines),
        "error": job.error, "strength": settings.strength if is_read else None,
        "where": settings.where if is_read else None, "settings": dict(settings.changes),
        "not_used": list(settings.left_out),
        "passes": {name: _data_of_pass(job.records.get(hires) or PassRecord()) for hires, name in PASSES.items()},
    }  # fmt: skip


def _data_of_pass(record: PassRecord) -> dict[str, Any]:
    """Return a pass's part of the report, over all batches, as JSON values; zeros if the pass did not run."""
    return {
        "batches": len(record.counts), "steps": sum(each.steps for each in record.counts),
        "steps_merged": sum(each.merged for each in record.counts),
        "stepped_aside": list(dict.fromkeys(record.refusals)), **record.report.as_data(),
    }  # fmt: skip


def _outcome(job: Job, hires: bool, has_hires: bool) -> str:
    """Say what merged in a pass, or why nothing did: without `has_hires` also that only the hires pass is to merge."""
    if job.config(hires) is None:
        is_missing = job.settings.strength and job.settings.where == HIRES and not has_hires
        return "not merged, because only the hires pass is to merge, and there is none" if is_missing else "left alone"
    record = job.records.get(hires)
    if record is None:
        return "did not run"
    whole = record.report
    if whole.merged_anything:
        return f"{_steps(record)}, {whole.headline}"
    why = list(dict.fromkeys([*record.refusals, *whole.notes]))
    if why and not whole.reasons:
        return f"nothing merged: {', '.join(why)}"
    return whole.headline if record.reports else "nothing merged: the model was not called"


def _steps(record: PassRecord) -> str:
    """Return ``20 steps``, or how many of them merged: ``12 of 20 steps``, ``7 of 40 steps in 2 batches``.

    The steps are those of one batch if all batches are alike.
    """
    counts = [(each.steps, each.merged) for each in record.counts if each.calls]
    kinds = counts[:1] if len(set(counts)) == 1 else counts
    steps, merged = map(sum, zip(*kinds, strict=True))
    batches = f" in {len(kinds)} batches" if len(kinds) > 1 else ""
    return f"{'' if merged == steps else f'{merged} of '}{count(steps, 'step')}{batches}"
