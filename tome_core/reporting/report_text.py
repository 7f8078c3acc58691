"""A report in words: at most ten lines, the one that matters most first.

report, level, phase: a `report.Report`, and the parts of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

MOST_LINES = 10
_KINDS = 3  # of token counts at a level, of reasons, and of sizes that were measured, that are told
_NOT_APPLIED = "not applied to this model."
_NOTHING_WILL = "nothing will merge: "  # how a note begins that says why


def percent(share: float) -> str:
    """``61 %``, never 100 where something is left."""
    return f"{min(share, 0.99 if share < 1 else 1.0):.0%}".replace("%", " %")


def count(number: int, noun: str) -> str:
    """``1 step``, ``2 steps``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def headline(report: Any) -> str:
    """The gain in time where it was measured, and what was left out: all in one line."""
    return ", ".join([*_speed(report), _outcome(report)])


def lines(report: Any, title: str, facts: Sequence[str] | None, beside: Sequence[str]) -> list[str]:
    """See `Report.lines`."""
    if not report.patched and not report.levels:
        return [f"{title}: {_NOT_APPLIED}"]
    facts = [count(report.calls, "model call")] if facts is None else facts
    speed, outcome = _speed(report), _outcome(report)
    places = " and ".join(f"/{level.downsample}" for level in report.levels if level.calls_merged)
    more = [f"{outcome}, at latent {places}"] if speed else []
    more += [*beside, *(line for level in report.levels for line in _level_lines(level)), *_why_not(report)]
    more += [*report.notes, *(f"settings: {one}" for one in report.settings), *_routes(report)]
    first = ", ".join(filter(None, [*facts, *(speed or [outcome])]))
    found = [f"{title}: {first}", *(f"  {line}" for line in more)]
    left = len(found) - MOST_LINES
    return found if left <= 0 else [*found[: MOST_LINES - 1], f"  {left + 1} more lines of detail are in its JSON form"]


def _speed(report: Any) -> list[str]:
    """``1.42 times as fast (measured)``, of several sizes each; nothing where that is not known of a picture."""
    gains = report.gains[-_KINDS:]
    if not gains or not report.calls_merged:
        return []
    if len(gains) == 1:
        return [f"{gains[0].ratio:.2f} times as fast (measured)"]
    sizes = [f"{gain.ratio:.2f} times as fast at {gain.size}" if gain.pays else f"no gain at {gain.size}"
             for gain in gains]  # fmt: skip
    return [f"{', '.join(sizes)} (measured)"]


def _outcome(report: Any) -> str:
    if report.calls_merged:
        return f"{percent(report.work_saved)} of attention left out" if report.work_saved else "attention left whole"
    why = [*map(_why, report.reasons),
           *(reason for level in report.levels for reason in level.traced),
           *(note.removeprefix(_NOTHING_WILL) for note in report.notes if note.startswith(_NOTHING_WILL))]  # fmt: skip
    return f"nothing merged: {why[0] if why else 'no call counted yet'}"


def _level_lines(level: Any) -> list[str]:
    """``latent /1, early: 4096 tokens -> 64 keys, 98 % left out``."""
    found = []
    for phase in level.phases:
        if phase.calls_merged:
            name = f", {phase.name}" if phase.name else ""
            found.append(f"latent /{level.downsample}{name}: {_kinds_text(phase)}")
    return found


def _kinds_text(phase: Any) -> str:
    sides: dict[int, list[str]] = {}
    for tokens, queries, keys in phase.tokens:
        sides.setdefault(tokens, []).append(_sides(tokens, queries, keys))
    kinds = [f"{tokens} tokens -> {' or '.join(left)}" for tokens, left in sides.items()]
    kinds += [f"MLP {tokens} tokens -> {left}" for tokens, left in phase.mlp_tokens]
    if len(kinds) > _KINDS:
        kinds[_KINDS:] = [f"{len(kinds) - _KINDS} other sizes"]
    saved = f", {percent(phase.work_saved)} left out" if phase.work_saved else ""
    return f"{'; '.join(kinds) or count(phase.calls_merged, 'call') + ' merged'}{saved}"


def _sides(tokens: int, queries: int, keys: int) -> str:
    if queries == keys:
        return str(keys)
    return f"{keys} keys" if queries == tokens else f"{queries} queries x {keys} keys"


def _why_not(report: Any) -> list[str]:
    counted = list(report.reasons.items())[:_KINDS]
    found = [f"not merged, {count(calls, 'call')}: {_why(reason)}" for reason, calls in counted]
    traced = dict.fromkeys(reason for level in report.levels for reason in level.traced)
    return found + [f"compiled without merging, {reason}" for reason in traced]


def _why(reason: str) -> str:
    """Without the part of a block, unless that is another than its self-attention, which everybody merges."""
    part, _, why = reason.partition(": ")
    return why if part in ("attn", "block") else reason


def _routes(report: Any) -> list[str]:
    return [f"proportional attention: {route}, {count(calls, 'call')}" for route, calls in report.routes.items()]
