"""Counts of a patch while it runs: what was merged, what was left alone and why."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields
from typing import Any

from ..compiling import when_traced

# why a call was left alone, in the words of more than one room
NO_GRID = "the tokens are not the picture's grid"
TOO_SMALL = "the grid is too small for the ratio to remove a token"
MASKED = "an attention mask came along"
REPLACED = "something else runs in its place"
TAKEN_OFF = "another program had taken the patch off"
OTHER_PARTS = "its rule merges other parts"
OF_OTHERS = "keys and values are not the picture's tokens"
TIME_IS_UNKNOWN = "the time is not known"


class Counted:
    """What is told of the counts of ``phases``: of one, of a level's, or of all levels'."""

    phases: tuple[PhaseReport, ...]

    @property
    def tokens(self) -> tuple[tuple[int, int, int], ...]:
        """(before, queries after, keys after) of each kind of merged self-attention call."""
        return tuple(sorted((kind[1:] for kind in self._sum("merged") if kind[0] == "attn"), reverse=True))

    @property
    def mlp_tokens(self) -> tuple[tuple[int, int], ...]:
        """(before, after) of each kind of merged call of a feed-forward layer."""
        return tuple(sorted((kind[1:3] for kind in self._sum("merged") if kind[0] == "mlp"), reverse=True))

    @property
    def calls_merged(self) -> int:
        """Calls of blocks' parts."""
        return self._sum("merged").total()

    @property
    def reasons(self) -> dict[str, int]:
        """Skipped calls of blocks' parts, or of whole blocks, by "part: reason", what cost most attention first."""
        lost = self._sum("lost")
        return dict(sorted(self._sum("skipped").items(), key=lambda one: (lost[one[0]], one[1]), reverse=True))

    @property
    def routes(self) -> dict[str, int]:
        """The ways of proportional attention, and calls."""
        return dict(self._sum("sized_by").most_common())

    @property
    def work_saved(self) -> float | None:
        """Share of the self-attention work (queries times keys) that was saved, None before any call."""
        full, left = self.work
        return 1 - left / full if full else None

    @property
    def work(self) -> tuple[int, int]:
        """Of all calls unmerged, and of what was left of it."""
        return sum(phase.work_full for phase in self.phases), sum(phase.work_left for phase in self.phases)

    def _sum(self, name: str) -> Counter:
        return sum((getattr(phase, name) for phase in self.phases), Counter())


@dataclass
class PhaseReport(Counted):
    """A level in one phase. name: "early" or "late"; "" where no rule has an early phase, or the time is not known.

    merged: calls by (part, tokens, queries left, keys left). skipped: calls by "part: reason". sized_by: calls by the
    way of proportional attention. lost: work of the skipped. The attention work of a call is queries times keys times
    batch, with that of the tokens that a correction answers exactly.
    """

    name: str
    merged: Counter = field(default_factory=Counter)
    skipped: Counter = field(default_factory=Counter)
    sized_by: Counter = field(default_factory=Counter)
    work_full: int = 0
    work_left: int = 0
    lost: Counter = field(default_factory=Counter)

    @property
    def phases(self) -> tuple[PhaseReport, ...]:
        """Itself."""
        return (self,)

    def __add__(self, other: PhaseReport) -> PhaseReport:
        counts = (getattr(self, one.name) + getattr(other, one.name) for one in fields(self)[1:])
        return PhaseReport(self.name, *counts)


def _none_yet() -> dict[str, PhaseReport]:
    return {name: PhaseReport(name) for name in ("", "early", "late")}


@dataclass
class LevelTally(Counted):
    """One level, in all phases. traced: why attentions were compiled without merging, which no call of them counts.

    level: counted from the finest. covered: can a rule merge here at some time?
    """

    downsample: int
    blocks: int
    by_name: dict[str, PhaseReport] = field(default_factory=_none_yet)
    traced: set[str] = field(default_factory=set)
    level: int = 0
    covered: bool = True

    @property
    def phases(self) -> tuple[PhaseReport, ...]:
        """Those of any calls."""
        return tuple(phase for phase in self.by_name.values() if phase.merged or phase.skipped or phase.work_full)

    def __add__(self, other: LevelTally) -> LevelTally:
        by_name = {name: phase + other.by_name[name] for name, phase in self.by_name.items()}
        blocks, covered = max(self.blocks, other.blocks), self.covered or other.covered
        return LevelTally(self.downsample, blocks, by_name, self.traced | other.traced, covered=covered)


class Ledger:
    """Keeps the counts of one patch while it runs. call: a `decision.Call`, None if it is not known."""

    def __init__(self, levels: list[LevelTally], notes: tuple[str, ...]) -> None:
        self.levels = levels
        self.notes = notes
        self.calls = 0

    def reset(self) -> None:
        """Count from nothing again."""
        self.calls = 0
        for level in self.levels:
            level.by_name = _none_yet()

    def merge(
        self, call: Any, level: int, part: str, before: tuple[int, int, int], after: tuple[int, int], route: str = "",
        exact: int = 0,
    ) -> None:  # fmt: skip
        """A call merged. before: (batch, queries, keys) of the unmerged call; after: (queries, keys) left.

        route: the way of a self-attention's proportional attention, or that it had none; "" where it was to have none.
        exact: tokens that were answered from all keys besides.
        """
        batch, queries, keys = before
        phase = self.levels[level].by_name[call.phase if call else ""]
        if route:
            phase.sized_by[route] += 1
        phase.merged[(part, queries, *after)] += 1
        if part == "attn":
            phase.work_full += batch * queries * keys
            phase.work_left += batch * (after[0] * after[1] + exact * keys)

    def skip(self, call: Any, level: int, part: str, reason: str, work: int = 0) -> None:
        """A call was left unmerged. work: batch times queries times keys of a self-attention."""
        phase = self.levels[level].by_name[call.phase if call else ""]
        phase.skipped[f"{part}: {reason}"] += 1
        phase.lost[f"{part}: {reason}"] += work
        phase.work_full += work
        phase.work_left += work

    def add_whole(self, call: Any, level: int, work: int) -> None:
        """Self-attention at a level at which nobody asks, because no rule reaches it."""
        phase = self.levels[level].by_name[call.phase]
        phase.work_full += work
        phase.work_left += work

    @when_traced
    def note_traced(self, level: int, reason: str) -> int:
        """An attention is being compiled as one that does not merge, which no call of it will count."""
        self.levels[level].traced.add(reason)
        return 0
