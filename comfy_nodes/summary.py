"""What a sampling came to, in words for a person: a line for the log, and a few more for the node."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

MOST_LINES = 10
_KINDS = 3  # of token counts at a level, and of reasons, that are told


def steps_text(done: int | None, planned: int | None) -> str:
    """``20 steps``; ``12 of 20 steps`` where the sampling was stopped; "" where nobody knows."""
    if planned is None:
        return ""
    count = f"{planned} step{'' if planned == 1 else 's'}"
    return count if done is None or done >= planned else f"{done} of {count}"


def lines_of(patches: Sequence[Any], steps: str, beside: Sequence[str]) -> list[str]:
    """At most `MOST_LINES`; the first says it all.

    patches: those that were called, at least one. steps: of `steps_text`. beside: what else is to be told.
    """
    reports = [patch.report() for patch in patches]
    levels = [level for report in reports for level in report.levels]
    reasons = _reasons(levels)
    notes = dict.fromkeys(note for report in reports for note in report.notes)
    facts = [steps, _outcome(patches, levels, [*(reason for reason, _ in reasons), *notes])]
    merged = [level for level in levels if level.calls_merged]
    lines = [f"ToMe: {', '.join(fact for fact in facts if fact)}", *beside]
    lines += [_level_text(level) for level in merged]
    lines += [f"not merged, {_count(calls, 'call')}: {reason}" for reason, calls in reasons]
    lines += notes
    if len(lines) > MOST_LINES:
        lines[MOST_LINES - 1 :] = ["ToMe Preview has the whole report"]
    return [lines[0], *(f"  {line}" for line in lines[1:])]


def _outcome(patches: Sequence[Any], levels: Sequence[Any], why: Sequence[str]) -> str:
    if any(level.calls_merged for level in levels):
        return _left_out(patches) or "self-attention left whole"
    if any(level.traced_merges for level in levels):
        return "inside a compiled model, where calls are not counted"
    return f"nothing merged: {why[0].removeprefix('nothing will merge: ')}" if why else "nothing merged"


def _left_out(patches: Sequence[Any]) -> str:
    """``61% of attention left out``: of the products of queries and keys of self-attention, over all levels."""
    tallies = [tally for patch in patches for tally in patch.run.ledger.levels]
    full, left = sum(tally.work_full for tally in tallies), sum(tally.work_left for tally in tallies)
    return f"{1 - left / full:.0%} of attention left out" if left < full else ""


def _level_text(level: Any) -> str:
    """``latent /1: 4096 tokens -> 576 keys or 64 keys, 92% left out``."""
    sides: dict[int, list[str]] = {}
    for tokens, queries, keys in level.tokens:
        sides.setdefault(tokens, []).append(_sides(tokens, queries, keys))
    kinds = [f"{tokens} tokens -> {' or '.join(left)}" for tokens, left in sides.items()]
    kinds += [f"MLP {n} tokens -> {left}" for n, left in level.mlp_tokens]
    if len(kinds) > _KINDS:
        kinds[_KINDS:] = [f"{len(kinds) - _KINDS} other sizes"]
    saved = f", {level.work_saved:.0%} left out" if level.work_saved else ""
    return f"latent /{level.downsample}: {'; '.join(kinds) or _count(level.calls_merged, 'call') + ' merged'}{saved}"


def _sides(tokens: int, queries: int, keys: int) -> str:
    if queries == keys:
        return str(keys)
    return f"{keys} keys" if queries == tokens else f"{queries} queries x {keys} keys"


def _reasons(levels: Sequence[Any]) -> list[tuple[str, int]]:
    """Why calls were left alone, and how many, the most frequent first."""
    counted: Counter[str] = Counter()
    for level in levels:
        counted.update(level.reasons)
    return [(reason.removeprefix("block: "), calls) for reason, calls in counted.most_common(_KINDS)]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
