"""Counts of a patch while it runs: what was merged, what was left alone and why."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

from ..compiling import when_traced

TIME_IS_UNKNOWN = "the time is not known"


@dataclass
class Tally:
    """Counts of one level in one phase. ``merged``: calls by (part, tokens, queries left, keys left).

    skipped: calls by (part, reason). routes: the ways of proportional attention, and calls. The attention work of a
    call is queries times keys times batch.
    """

    merged: Counter = field(default_factory=Counter)
    skipped: Counter = field(default_factory=Counter)
    routes: Counter = field(default_factory=Counter)
    work_full: int = 0
    work_left: int = 0


@dataclass
class LevelTally:
    """Counts of one level, by phase. traced: why attentions were compiled without merging."""

    downsample: int
    blocks: int
    phases: dict[str, Tally] = field(default_factory=lambda: defaultdict(Tally))
    traced: set[str] = field(default_factory=set)


class Ledger:
    """Keeps the counts of one patch while it runs. call: a `decision.Call`, None if it is not known."""

    def __init__(self, levels: list[LevelTally], notes: tuple[str, ...]) -> None:
        self.levels = levels
        self.notes = notes
        self.calls = 0

    def reset(self) -> None:
        """Count from nothing again; in place."""
        self.calls = 0
        for tally in self.levels:
            tally.phases.clear()

    def merge(
        self, call: Any, level: int, part: str, before: tuple[int, int, int], after: tuple[int, int], route: str = ""
    ) -> None:
        """A call merged. before: (batch, queries, keys) of the unmerged call; after: (queries, keys) left.

        route: the way of a self-attention's proportional attention, or that it had none; "" where it was to have none.
        """
        batch, queries, keys = before
        tally = self.levels[level].phases[call.phase if call else ""]
        if route:
            tally.routes[route] += 1
        tally.merged[(part, queries, *after)] += 1
        if part == "attn":
            tally.work_full += batch * queries * keys
            tally.work_left += batch * after[0] * after[1]

    def skip(self, call: Any, level: int, part: str, reason: str, work: int = 0) -> None:
        """A call was left unmerged. work: batch times queries times keys of a self-attention."""
        tally = self.levels[level].phases[call.phase if call else ""]
        tally.skipped[part, reason] += 1
        tally.work_full += work
        tally.work_left += work

    @when_traced
    def note_traced(self, level: int, reason: str) -> int:
        """An attention is being compiled as one that does not merge, which no call of it will count."""
        self.levels[level].traced.add(reason)
        return 0
