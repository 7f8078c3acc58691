"""What merging does to a model in one sampling, by its fits' own estimates, and how many tokens are kept because of it.

A fit knows exact answers: those of some queries to all keys, or those of whole blocks to some samples of the tokens.
What it leaves of each, if fitted to the others, tells its error: a mean square, relative to that of the answers. An
attention's error counts by the share of its level's attentions in the model, a block's is a mean over its level's
stretches. A rule with `max_error` keeps at least as many keys, or tokens, as this error takes.

No decision waits for the device: a step reads what was written before the step before it began. So equal seeds give
equal pictures, however fast the device is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from ..settings.config import MergeRule
from ..settings.presets import MOST_MERGED, PARTS, with_share

Points = tuple[tuple[float, float], ...]  # a positive quantity at timesteps, ascending
ATTN, BLOCK = "attn", "block"  # kinds of parts
# Typical errors, by kind: of an attention that keeps 1/64 of the keys, and of blocks on 1/16 of the tokens. Means over
# small UNets.
_TYPICAL: dict[str, Points] = {
    ATTN: ((0, 1.5e-3), (250, 1.8e-3), (500, 2e-3), (750, 3e-3), (875, 4.5e-3), (1000, 1.3e-2)),
    BLOCK: ((0, 1.2e-2), (250, 2.6e-2), (500, 5e-2), (750, 7.5e-2), (1000, 0.12)),
}
# How many times `max_error` an error may be. UNets mend in later steps what is wrong in noisy ones: of five curves that
# were tried on two of them the steepest was best. A block's error may rise as the typical one.
# ``python -m benchmarks.own_error`` measures what they give.
_ALLOWED: dict[str, Points] = {
    ATTN: ((0, 1.0), (375, 1.35), (500, 3.3), (700, 10.0), (850, 20.0), (1000, 55.0)),
    BLOCK: tuple((time, error / _TYPICAL[BLOCK][0][1]) for time, error in _TYPICAL[BLOCK]),
}
_NEARLY_ALL = 0.99  # the highest share of which an error is expected
# a few shares, in 1/64, so that kernels and kept plans stay few; more than the last is all
_LADDER, _OF_BLOCKS = (1, 2, 3, 4, 6, 9, 13, 19, 28, 36), (4, 8, 16, 32)


def typical(kind: str, timestep: float, share: float) -> float:
    """Return a typical error of a part of a kind that keeps a share of its keys or tokens, at a timestep.

    How it depends on the share was fitted to five models. The timestep is on Stable Diffusion's schedule.
    """
    by_time, share = _between(_TYPICAL[kind], timestep), min(share, _NEARLY_ALL)
    if kind != BLOCK:
        return by_time * (PARTS * share) ** -0.5 * ((1 - share) / (1 - 1 / PARTS)) ** 1.6
    return by_time * (16 * share) ** -0.35 * ((1 - share) / (1 - 1 / 16)) ** 0.5


def allowed(kind: str, timestep: float) -> float:
    """Return how many times `max_error` the error of a kind may be, at a timestep of Stable Diffusion's schedule."""
    return _between(_ALLOWED[kind], timestep)


def _between(points: Points, timestep: float) -> float:
    """Return a quantity at a timestep: between two points its logarithm is a line, outside of all it is constant."""
    for (low, first), (high, last) in pairwise(points):
        if timestep <= high:
            position = max(0.0, (timestep - low) / (high - low))
            return first ** (1 - position) * last**position
    return points[-1][1]


class Noted:
    """The error of one attention, or of one stretch, at one step."""

    def __init__(self, kind: str, level: int, timestep: float, share: float, squares: Tensor) -> None:
        self.kind, self.level, self.timestep = kind, level, timestep
        self.share = share  # of the keys or tokens that were kept
        self.squares: Tensor | None = squares  # those of `Correction.error`, until they are read
        self._error = 0.0

    def take(self, rows: Sequence[Sequence[float]]) -> None:
        """Read the squares, given as numbers: what is left relative to the answers, over all heads and samples."""
        left, answers = map(sum, zip(*rows, strict=True))
        self.squares, self._error = None, left / answers if answers > 0 and math.isfinite(left / answers) else 0.0

    def read(self) -> float:
        """Return the error; if it was not read yet, this waits for the device."""
        if self.squares is not None:
            self.take(self.squares.tolist())
        return self._error


class _Step:
    """The errors that were noted at one step, and their way to the CPU."""

    def __init__(self, timestep: float) -> None:
        self.timestep = timestep
        self.noted: list[Noted] = []
        self._sent: tuple[Tensor, torch.cuda.Event, list[int]] | None = None

    def send(self) -> None:
        """Begin to copy all squares from a device of `_SENDS`, in two launches, and wait for nothing."""
        squares = [one.squares for one in self.noted if one.squares is not None]
        if squares and len(squares) == len(self.noted) and all(part.device.type in _SENDS for part in squares):
            self._sent = *_begin_copy(torch.cat(squares)), [*map(len, squares)]

    def read(self) -> list[Noted]:
        """Return the errors, read."""
        if self._sent is not None:
            there, event, lengths = self._sent
            event.synchronize()
            for one, rows in zip(self.noted, there.split(lengths), strict=True):
                if one.squares is not None:  # a report may have read it
                    one.take(rows.tolist())
        return self.noted


_SENDS = ("cuda",)  # devices with events; others are read directly


def _begin_copy(x: Tensor) -> tuple[Tensor, torch.cuda.Event]:
    """Return a tensor on the CPU that will hold the values of one on CUDA as soon as an event has passed."""
    there, event = torch.empty(x.shape, dtype=x.dtype, pin_memory=True), torch.cuda.Event()
    there.copy_(x, non_blocking=True)
    event.record(torch.cuda.current_stream(x.device))
    return there, event


class OwnError:
    """The errors of one sampling, by kind and level, and the rules that these follow because of them.

    An error is followed as a factor of the typical one, because errors are read late, and change with time and share.
    """

    def __init__(self) -> None:
        self._factors: dict[tuple[str, int], float] = {}  # of the latest errors that were read
        self._steps: list[_Step] = []  # the latest two, whose errors were not read
        # by kind and level: the rule of the settings, the timestep of its match, the rule that is followed
        self._chosen: dict[tuple[str, int], tuple[MergeRule, float, MergeRule | None]] = {}

    def note(self, noted: Noted) -> None:
        """Note an error at the step that `begin` has begun last."""
        if self._steps:
            self._steps[-1].noted.append(noted)

    def begin(self, timestep: float) -> None:
        """Begin a call at a timestep. If it is a new one, read the errors of all steps but the latest before it."""
        if self._steps and self._steps[-1].timestep == timestep:
            return
        if self._steps:
            self._steps[-1].send()
        self._steps.append(_Step(timestep))
        while len(self._steps) > 2:
            factors: dict[tuple[str, int], list[float]] = {}
            for one in self._steps.pop(0).read():
                factor = one.read() / typical(one.kind, one.timestep, one.share)
                factors.setdefault((one.kind, one.level), []).append(factor)
            self._factors |= {place: sum(found) / len(found) for place, found in factors.items()}

    def rule_for(self, kind: str, level: int, rule: MergeRule, timestep: float, weight: float) -> MergeRule | None:
        """Return the rule that a level's parts of a kind follow at a step; None: they keep all tokens.

        It is `rule` with as many more keys or tokens as its `max_error` takes. It changes only with a new match. Before
        an error was read, it is `rule`.

        Args:
            kind: `ATTN` or `BLOCK`.
            level: its number.
            rule: that of the settings, which keeps the fewest.
            timestep: of the step, on Stable Diffusion's schedule.
            weight: by which the error counts.
        """
        place = kind, level
        base, begun, kept = self._chosen.get(place, (None, 0.0, None))
        if base is rule and abs(begun - timestep) <= rule.keep:
            return kept
        kept, rules = rule, (rule, *_that_keep_more(kind, rule))
        factor = self._factors.get(place)
        if factor is not None:
            most = rule.max_error * allowed(kind, timestep)
            errors = (weight * factor * typical(kind, timestep, 1 - one.effective_ratio) for one in rules)
            kept = next((one for one, error in zip(rules, errors, strict=True) if error <= most), None)
        self._chosen[place] = rule, timestep, kept
        return kept


def _that_keep_more(kind: str, rule: MergeRule) -> Sequence[MergeRule]:
    """Return rules that keep more keys or tokens, up to `MOST_MERGED`: the same objects for equal arguments."""
    if (kind, rule) not in _KNOWN:
        ladder, change = (_OF_BLOCKS, _with_tokens) if kind == BLOCK else (_LADDER, with_share)
        more = [share / PARTS for share in ladder if 1 - rule.effective_ratio < share / PARTS <= MOST_MERGED]
        _KNOWN[kind, rule] = tuple(change(rule, share) for share in more)
    return _KNOWN[kind, rule]


def _with_tokens(rule: MergeRule, share: float) -> MergeRule:
    """Return a rule of whole blocks that keeps another share of the tokens."""
    return replace(rule, ratio=1 - share)


_KNOWN: dict[tuple[str, MergeRule], tuple[MergeRule, ...]] = {}
