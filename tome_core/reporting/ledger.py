"""Counts of a patch while it runs: merged calls, unmerged calls, and the reasons."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from ..compiling import when_traced


class Reason(str):
    """The reason why something does not merge, for the report, where a function returns it in place of a value.

    Code that a compiler traces uses plain text, because compilers know no constants of such a class.
    """

    __slots__ = ()


# reasons why a call was not merged that several modules use, and those of which the report tells harmless ones apart
NO_GRID = Reason("the tokens are not those of the whole picture")
TOO_SMALL = "the picture is too small for this ratio to merge a token"
MASKED = "an attention mask is on"
REPLACED = "another program runs in its place"
TAKEN_OFF = "another program had taken the patch off"
FEW_TOKENS = "the picture is so small that merging would not pay"
OTHER_PARTS = "its rule merges other parts"
ARGUMENTS = "called with unsupported arguments"
NOT_BETWEEN = "these steps stay whole, by start and end"
NOT_NOW = "these steps stay whole, by the strength or the settings"
RATIO_IS_0 = "its rule has ratio 0"
NOT_AT_THIS_SIZE = "at this size the GPU waits for kernel launches, so merging would not pay (estimated)"
REFINED = Reason("it prepares the text or the picture for the model's blocks")
PARTS_COMPILED = "its parts merge by a rule that compiled blocks do not follow"
OF_OTHERS = "it looks at other tokens than the picture's"
TIME_IS_UNKNOWN = "the time is not known"
TOO_WRONG = "here merging changes this model more than the strength allows"
COSTS = "merging would cost more work than it saves at this size"
# beginnings of reasons that are as the settings ask, or that cost next to nothing: the report tells them last, and not
# as something that hindered merging
HARMLESS = (NOT_BETWEEN, NOT_NOW, FEW_TOKENS, NOT_AT_THIS_SIZE, COSTS, RATIO_IS_0, OTHER_PARTS, TOO_SMALL, REFINED)


_MOST_NOTED = 2048  # of errors that wait to be read: all of a picture


class Counted:
    """The base of `LevelTally` and `Report`: figures computed from the counts of ``levels``, one or all of a model."""

    levels: tuple[LevelTally, ...]
    rest: int = 0  # the work outside blocks

    @property
    def tokens(self) -> tuple[tuple[int, int, int], ...]:
        """Each kind of merged self-attention call, as (tokens before, queries after, keys after), the largest first."""
        return tuple(sorted((kind[1:] for kind in self._sum("merged") if kind[0] == "attn"), reverse=True))

    @property
    def mlp_tokens(self) -> tuple[tuple[int, int], ...]:
        """Each kind of merged feed-forward call, as (tokens before, tokens after), the largest first."""
        return tuple(sorted((kind[1:3] for kind in self._sum("merged") if kind[0] == "mlp"), reverse=True))

    @property
    def block_tokens(self) -> tuple[tuple[int, int], ...]:
        """Each kind of a whole merged block, as (tokens before, tokens after), the largest first."""
        return tuple(sorted((kind[1:3] for kind in self._sum("merged") if kind[0] == "block"), reverse=True))

    @property
    def calls_merged(self) -> int:
        """Number of merged calls of parts of blocks, such as a self-attention."""
        return self._sum("merged").total()

    @property
    def reasons(self) -> dict[str, int]:
        """Number of unmerged calls by "part: reason", such as ``attn: the call has ...``; most work first."""
        lost = self._sum("skipped_work")
        return dict(sorted(self._sum("skipped").items(), key=lambda item: (lost[item[0]], item[1]), reverse=True))

    @property
    def work_saved(self) -> float | None:
        """Share of the work that was left out, 0 to 1; None if no work was counted."""
        full, left = self.work
        return max(0.0, 1 - left / full) if full else None

    @property
    def work(self) -> tuple[int, int]:
        """Work of all calls: without merging, and with merging and all that it costs.

        It is the multiplications of a model's layers and attentions; of a level those of its blocks. Text, times and
        what is computed once for a picture are left out: a few percent.
        """
        full, left = (sum(getattr(level, name) for level in self.levels) for name in ("work_full", "work_left"))
        return full + self.rest, left + self.rest

    def _sum(self, name: str) -> Counter:
        """Return the sum over all levels of a Counter of `LevelTally`, by its name, such as "merged"."""
        return sum((getattr(level, name) for level in self.levels), Counter())


_COUNTS = ("merged", "skipped", "skipped_work", "sized_by", "work_full", "work_left", "errors", "fits", "bounded")


@dataclass
class LevelTally(Counted):
    """The counts of one level of a model, which is all blocks whose tokens have one size. ``+`` adds two tallies."""

    downsample: int  # latent cells per token, along a side; in a sum the first tally's
    blocks: int  # 0 if not known; in a sum the larger number
    merged: Counter = field(default_factory=Counter)  # calls by (part, tokens, queries left, keys left)
    skipped: Counter = field(default_factory=Counter)  # unmerged calls by "part: reason"
    skipped_work: Counter = field(default_factory=Counter)  # what they might have merged, also by "part: reason"
    sized_by: Counter = field(default_factory=Counter)  # merged calls by what weights a key by its number of tokens
    work_full: int = 0  # the work of all blocks without merging
    work_left: int = 0  # the same with merging, and what merging costs
    # sums of errors that fits told, relative and squared, and numbers of fits, by (part, timestep, share of keys)
    errors: Counter = field(default_factory=Counter)
    fits: Counter = field(default_factory=Counter)
    # model calls by (part, share) in which more keys or tokens were kept than the rule asks, 1: all, to bound the error
    bounded: Counter = field(default_factory=Counter)
    traced: set[str] = field(default_factory=set)  # why attentions were compiled without merging; they are not counted
    level: int = 0  # 0 for the finest
    covered: bool = True  # a rule can merge here at some time
    channels: int = 0  # of a self-attention, all heads together; 0: not known yet
    per_token: int = 0  # weights by which each token is multiplied in a block, on average; 0 if not known

    @property
    def levels(self) -> tuple[LevelTally, ...]:
        """A tuple of this tally alone, for `Counted`."""
        return (self,)

    def __add__(self, other: LevelTally) -> LevelTally:
        counts = {name: getattr(self, name) + getattr(other, name) for name in _COUNTS}
        blocks, covered = max(self.blocks, other.blocks), self.covered or other.covered
        return LevelTally(self.downsample, blocks, **counts, traced=self.traced | other.traced, covered=covered)


class Ledger:
    """The counts of one patch, of calls of its model and of levels, the finest first, with texts for the report."""

    def __init__(self, levels: list[LevelTally], notes: tuple[str, ...]) -> None:
        self.levels, self.notes, self.calls, self.rest = levels, notes, 0, 0
        self.too_early = 0  # calls of the model before the time in which whole blocks merge
        self._noted: list[Any] = []  # errors that the device may not have written yet

    def reset(self) -> None:
        """Set all counts to zero, in new tallies that share the set `LevelTally.traced` with the old. Notes stay."""
        self.calls = self.rest = self.too_early = 0
        self._noted = []
        self.levels = [LevelTally(tally.downsample, tally.blocks, traced=tally.traced, level=tally.level,
                                  covered=tally.covered, channels=tally.channels, per_token=tally.per_token)
                       for tally in self.levels]  # fmt: skip

    def merge(self, level: int, part: str, before: tuple[int, int, int], after: tuple[int, int], route: str = "",
              weights: int = 0, cost: int = 0) -> None:  # fmt: skip
        """Count a merged call of a part: "attn", with which its block's work counts too, "crossattn", "mlp" or "block".

        `before` is (batch, queries, keys), `after` is (queries, keys); keys are 0 for "mlp". `route` names the
        implementation of proportional attention, or says that there was none; "" if the rule wants none. `weights` is
        the number by which each of the queries after merging was multiplied, and no other. `cost` is the work that
        merging needed, of the whole batch.
        """
        batch, queries, keys = before
        tally = self.levels[level]
        if route:
            tally.sized_by[route] += 1
        tally.merged[(part, queries, *after)] += 1
        if part == "attn":  # its work: queries by keys, and weights by values
            tally.work_full += batch * queries * (tally.per_token + 2 * keys * tally.channels)
            tally.work_left += batch * (queries * tally.per_token + 2 * after[0] * after[1] * tally.channels)
        tally.work_left += cost - batch * (queries - after[0]) * weights

    def skip(self, level: int, part: str, reason: str, batch: int = 0, tokens: int = 0) -> None:
        """Count an unmerged call of a part, "attn", "crossattn" or "mlp", or of a whole "block", with the reason.

        For "attn" and "block" the work that did not merge is counted, too: of `batch` samples of `tokens` tokens. Only
        "attn" adds its block's work to the level's, so a "block" adds none of it a second time.
        """
        tally = self.levels[level]
        name, work = f"{part}: {reason}", 2 * batch * tokens**2 * tally.channels
        of_block = batch * tokens * tally.per_token
        tally.skipped[name] += 1
        if part in ("attn", "block"):
            tally.skipped_work[name] += work + (of_block if part == "block" else 0)
        if part == "attn":  # a block's own attention tells its work
            tally.work_full += work + of_block
            tally.work_left += work + of_block

    def note_error(self, noted: Any) -> None:
        """Note an `own_error.Noted`."""
        self._noted.append(noted)
        if len(self._noted) >= _MOST_NOTED:
            self.read_errors(_MOST_NOTED // 2)

    def read_errors(self, count: int | None = None) -> None:
        """Count the errors that were noted, or the first so many; waits until the device has written them."""
        noted, self._noted = self._noted[:count], [] if count is None else self._noted[count:]
        for one in noted:
            part = "block" if one.kind == "block" else "attn"
            tally, key = self.levels[one.level], (part, round(one.timestep, 1), round(one.share, 4))
            tally.errors[key] += one.read()
            tally.fits[key] += 1

    def add_whole(self, level: int, batch: int, tokens: int) -> None:
        """Count the work of all blocks of a level that no rule reaches, whose attentions are not counted."""
        tally = self.levels[level]
        work = tally.blocks * batch * tokens * (tally.per_token + 2 * tokens * tally.channels)
        tally.work_full += work
        tally.work_left += work

    @when_traced
    def note_traced(self, level: int, reason: str) -> int:
        """Note why an attention is compiled without merging, uncounted; return 0: the compiler needs a constant."""
        self.levels[level].traced.add(reason)
        return 0
