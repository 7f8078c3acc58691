"""From the rows of a speed run to its figures. A figure whose control is not in the same run does not exist here."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.speed_costs import OUT_OF_MEMORY
from benchmarks.speed_variants import CONTROL, IDEAL, NO_ATTENTION, VARIANTS

_LEAST_SAVING = 0.02  # a share of a bound that saves less than this is noise over noise


@dataclass(frozen=True)
class Figure:
    """One variant in one case. What was not measured, or has nothing to be compared with, is None.

    times, block_times: seconds of each round, of the call and of the blocks of the finest level in it. factor,
    block_factor: how many times as fast as the control, the median over rounds. of_ideal, of_no_attention: the saving
    as a share of the bound's; the first one of the blocks where those were timed. bound: seconds of the roofline of
    what this variant computes. of_bound: how near the time is to it, 1 at the bound. failed: why there are no times.
    """

    times: tuple[float, ...] = ()
    factor: float | None = None
    block_times: tuple[float, ...] = ()
    block_factor: float | None = None
    of_ideal: float | None = None
    of_no_attention: float | None = None
    peak_mib: float | None = None
    kernels: int | None = None
    operators: int | None = None
    bound: float | None = None
    of_bound: float | None = None
    failed: str | None = None


@dataclass(frozen=True)
class Summary:
    """One case: its fields as in `speed_plan.UNetCase`, rounds measured, a figure for each variant, and the device's
    rates of which the bounds are made, as in `speed_costs.Rates`; None in results from before there were bounds.

    Without the control's times or its failure there are no figures.
    """

    case: dict[str, Any]
    key: str
    rounds: int
    figures: dict[str, Figure]
    rates: dict[str, float] | None = None


def summaries(record: dict[str, Any]) -> list[Summary]:
    """The cases of a record that have any row, in the order of their first."""
    by_case: dict[str, list[dict[str, Any]]] = {}
    for row in record["rows"]:
        by_case.setdefault(row["key"].rsplit(" #", 1)[0], []).append(row)
    names = list(record["settings"]["variants"])
    return [_summary(key, rows, names) for key, rows in by_case.items()]


def failures(record: dict[str, Any]) -> dict[str, str]:
    """``case: variant`` -> why it failed, for reasons other than memory."""
    return {
        f"{row['key'].rsplit(' #', 1)[0]}: {name}": reason
        for row in record["rows"] for name, reason in row["failed"].items() if reason != OUT_OF_MEMORY
    }  # fmt: skip


def _summary(key: str, rows: list[dict[str, Any]], names: list[str]) -> Summary:
    rounds = [row for row in rows if "seconds" in row and CONTROL in row["seconds"] | row["failed"]]
    failed = {name: reason for row in rounds for name, reason in row["failed"].items()}
    figures = {}
    if rounds:
        for name in names:
            if name in failed or any(name in row["seconds"] for row in rounds):
                figures[name] = _figure(name, rows, rounds, failed.get(name))
    rates = next((row["rates"] for row in rows if "rates" in row), None)
    return Summary(rows[0]["case"], key, len(rounds), figures, rates)


def _figure(name: str, rows: list[dict[str, Any]], rounds: list[dict[str, Any]], failed: str | None) -> Figure:
    # a bound's share is told by the blocks alone where they were timed: the rest of a call varies by as much
    blocks = "block_seconds" if any("block_seconds" in row for row in rounds) else "seconds"
    ideal_is_bound = VARIANTS[name].bound == IDEAL if name in VARIANTS else False
    times, bound = _times(rounds, name, "seconds"), _single(rows, "roofline", name)
    return Figure(
        times=times,
        factor=_factor(rounds, name, "seconds"),
        block_times=_times(rounds, name, "block_seconds"),
        block_factor=_factor(rounds, name, "block_seconds"),
        of_ideal=_saving_of(rounds, name, IDEAL, blocks) if ideal_is_bound else None,
        of_no_attention=_saving_of(rounds, name, NO_ATTENTION, "seconds") if name != NO_ATTENTION else None,
        peak_mib=_single(rows, "peak_mib", name),
        kernels=_single(rows, "kernels", name),
        operators=_single(rows, "operators", name),
        bound=bound and bound["seconds"],
        of_bound=bound["seconds"] / median(times) if bound and times else None,
        failed=failed,
    )


def _times(rounds: list[dict[str, Any]], name: str, field: str) -> tuple[float, ...]:
    return tuple(row[field][name] for row in rounds if name in row.get(field, {}))


def _median_share(rounds: list[dict[str, Any]], name: str, field: str) -> float | None:
    """Median over the rounds of the variant's time as a share of the control's in the same round."""
    both = [row[field] for row in rounds if {name, CONTROL} <= row.get(field, {}).keys()]
    return median(times[name] / times[CONTROL] for times in both) if both else None


def _factor(rounds: list[dict[str, Any]], name: str, field: str) -> float | None:
    share = _median_share(rounds, name, field)
    return 1 / share if share else None


def _saving_of(rounds: list[dict[str, Any]], name: str, bound: str, field: str) -> float | None:
    own, possible = _median_share(rounds, name, field), _median_share(rounds, bound, field)
    if name == CONTROL or own is None or possible is None or 1 - possible < _LEAST_SAVING:
        return None
    return (1 - own) / (1 - possible)


def _single(rows: list[dict[str, Any]], field: str, name: str) -> Any:
    """What one of the rows says of costs, for a variant that stands beside the control there."""
    return next((row[field][name] for row in rows if {name, CONTROL} <= row.get(field, {}).keys()), None)
