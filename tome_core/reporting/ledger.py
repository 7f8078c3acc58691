"""Counts of a patch while it runs: what was merged, what was left alone and why."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

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
    """What is told of the counts of ``levels``: of one, or of all."""

    levels: tuple[LevelTally, ...]

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
    def work_saved(self) -> float | None:
        """Share of the self-attention work (queries times keys) that was saved, None before any call."""
        full, left = self.work
        return 1 - left / full if full else None

    @property
    def work(self) -> tuple[int, int]:
        """Of all calls unmerged, and of what was left of it."""
        return sum(level.work_full for level in self.levels), sum(level.work_left for level in self.levels)

    def _sum(self, name: str) -> Counter:
        return sum((getattr(level, name) for level in self.levels), Counter())


_COUNTS = ("merged", "skipped", "lost", "sized_by", "work_full", "work_left")


@dataclass
class LevelTally(Counted):
    """One level of a model.

    merged: calls by (part, tokens, queries left, keys left). skipped: calls by "part: reason"; lost: their work.
    sized_by: calls by the way of proportional attention. The attention work of a call is queries times keys times
    batch, with that of the tokens that a correction answers exactly. traced: why attentions were compiled without
    merging, which no call of them counts. level: counted from the finest. covered: can a rule merge here at some time?
    """

    downsample: int
    blocks: int
    merged: Counter = field(default_factory=Counter)
    skipped: Counter = field(default_factory=Counter)
    lost: Counter = field(default_factory=Counter)
    sized_by: Counter = field(default_factory=Counter)
    work_full: int = 0
    work_left: int = 0
    traced: set[str] = field(default_factory=set)
    level: int = 0
    covered: bool = True

    @property
    def levels(self) -> tuple[LevelTally, ...]:
        """Itself."""
        return (self,)

    def __add__(self, other: LevelTally) -> LevelTally:
        counts = {name: getattr(self, name) + getattr(other, name) for name in _COUNTS}
        blocks, covered = max(self.blocks, other.blocks), self.covered or other.covered
        return LevelTally(self.downsample, blocks, **counts, traced=self.traced | other.traced, covered=covered)


class Ledger:
    """Keeps the counts of one patch while it runs."""

    def __init__(self, levels: list[LevelTally], notes: tuple[str, ...]) -> None:
        self.levels = levels
        self.notes = notes
        self.calls = 0

    def reset(self) -> None:
        """Count from nothing again."""
        self.calls = 0
        self.levels = [LevelTally(one.downsample, one.blocks, traced=one.traced, level=one.level, covered=one.covered)
                       for one in self.levels]  # fmt: skip

    def merge(
        self, level: int, part: str, before: tuple[int, int, int], after: tuple[int, int], route: str = "",
        exact: int = 0,
    ) -> None:  # fmt: skip
        """A call merged. before: (batch, queries, keys) of the unmerged call; after: (queries, keys) left.

        route: the way of a self-attention's proportional attention, or that it had none; "" where it was to have none.
        exact: tokens that were answered from all keys besides.
        """
        batch, queries, keys = before
        tally = self.levels[level]
        if route:
            tally.sized_by[route] += 1
        tally.merged[(part, queries, *after)] += 1
        if part == "attn":
            tally.work_full += batch * queries * keys
            tally.work_left += batch * (after[0] * after[1] + exact * keys)

    def skip(self, level: int, part: str, reason: str, work: int = 0) -> None:
        """A call was left unmerged. work: batch times queries times keys of a self-attention."""
        tally = self.levels[level]
        tally.skipped[f"{part}: {reason}"] += 1
        tally.lost[f"{part}: {reason}"] += work
        tally.work_full += work
        tally.work_left += work

    def add_whole(self, level: int, work: int) -> None:
        """Self-attention at a level at which nobody asks, because no rule reaches it."""
        self.levels[level].work_full += work
        self.levels[level].work_left += work

    @when_traced
    def note_traced(self, level: int, reason: str) -> int:
        """An attention is being compiled as one that does not merge, which no call of it will count."""
        self.levels[level].traced.add(reason)
        return 0
