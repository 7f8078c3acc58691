"""Counts of a patch while it runs: what was merged, what was left alone and why."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from operator import index
from typing import Any

import torch

from ..compiling import compiles_here, when_traced

logger = logging.getLogger(__name__)

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
    """Counts of one level, by phase. traced: what was decided while a compiler traced, which is of no phase."""

    downsample: int
    blocks: int
    phases: dict[str, Tally] = field(default_factory=lambda: defaultdict(Tally))
    traced_merges: set[tuple[str, int, int, int]] = field(default_factory=set)
    traced_skips: set[str] = field(default_factory=set)
    traced_routes: set[str] = field(default_factory=set)


class Ledger:
    """Keeps the counts of one patch while it runs; only eager code writes into it.

    In a compiled graph a counter would be traced away or force a new graph at every call, so there the decision is
    noted when it is traced. call: a `call.Call`, None where nobody knows it; a graph must not look at its phase.
    """

    def __init__(self, levels: list[LevelTally], notes: tuple[str, ...]) -> None:
        self.levels = levels
        self.notes = notes
        self.calls = 0
        self._time_was_missed = False

    def reset(self) -> None:
        """Count from nothing again; in place, because compiled graphs hold on to these objects."""
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
        if torch.compiler.is_compiling() and compiles_here():
            self.trace_merge(index(level), part, index(queries), index(after[0]), index(after[1]), route)
            return
        tally = self.levels[level].phases[call.phase if call else ""]
        if route:
            tally.routes[route] += 1
        tally.merged[(part, queries, *after)] += 1
        if part == "attn":
            tally.work_full += batch * queries * keys
            tally.work_left += batch * after[0] * after[1]

    def count_unmerged(self, call: Any, level: int, work: int) -> None:
        """Count the work of a self-attention that no rule merges here, though other parts of its block merge.

        work: batch times queries times keys.
        """
        if not (torch.compiler.is_compiling() and compiles_here()):
            tally = self.levels[level].phases[call.phase if call else ""]
            tally.work_full += work
            tally.work_left += work

    def skip(self, call: Any, level: int, part: str, reason: str, work: int = 0, calls: int = 1) -> None:
        """Calls were left unmerged. work: batch times queries times keys of a self-attention, for each of them."""
        if torch.compiler.is_compiling() and compiles_here():
            self.trace_skip(index(level), part, reason)
            return
        tally = self.levels[level].phases[call.phase if call else ""]
        tally.skipped[part, reason] += calls
        tally.work_full += work * calls
        tally.work_left += work * calls

    @when_traced
    def trace_merge(self, level: int, part: str, tokens: int, queries: int, keys: int, route: str) -> int:
        """A call is being compiled as a merged one. route: as of `merge`."""
        self.levels[level].traced_merges.add((part, tokens, queries, keys))
        self.levels[level].traced_routes.update([route] if route else ())
        return 0

    @when_traced
    def trace_skip(self, level: int, part: str, reason: str) -> int:
        """A call is being compiled as one that is left unmerged."""
        self.levels[level].traced_skips.add(f"{part}: {reason}")
        if reason == TIME_IS_UNKNOWN and not self._time_was_missed:
            self._time_was_missed = True
            logger.warning(
                "A rule is limited in time, but a UNet compiled as a whole cannot look at its own timestep, so it is "
                "compiled without merging: call handle.set_time(...) before each step."
            )
        return 0
