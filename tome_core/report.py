"""What was merged where, what it saved, and why something was skipped."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import index

import torch

from .gains import Gain

logger = logging.getLogger(__name__)

TIME_IS_UNKNOWN = "the time is not known"


def when_traced(method: Callable) -> Callable:
    """Make a compiler call the method once, while it traces, instead of looking inside.

    What `torch.compiler.assume_constant_result` does, without its import of the whole compiler. The arguments
    have to be constants.
    """
    method._dynamo_marked_constant = True
    return method


@dataclass
class LevelTally:
    """Counts of one level. ``merged``: calls by (part, tokens, queries left, keys left).

    skipped: calls by (part, reason). routes: how merged keys got to know their sizes, by way and calls.
    traced_merges, traced_skips, traced_routes: what was decided while a compiler traced. The attention work of a call
    is queries times keys times batch.
    """

    downsample: int
    blocks: int
    merged: Counter = field(default_factory=Counter)
    skipped: Counter = field(default_factory=Counter)
    traced_merges: set[tuple[str, int, int, int]] = field(default_factory=set)
    traced_skips: set[str] = field(default_factory=set)
    routes: Counter = field(default_factory=Counter)
    traced_routes: set[str] = field(default_factory=set)
    work_full: int = 0
    work_left: int = 0


class Ledger:
    """Keeps the counts of one patch while it runs; only eager code writes into it.

    Inside a compiled graph a Python counter would either be traced away or force a new graph at every call,
    so there only the decision is noted, when it is traced.
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
            tally.merged.clear()
            tally.skipped.clear()
            tally.routes.clear()
            tally.work_full = tally.work_left = 0

    def begin_call(self) -> None:
        """One more call of the UNet."""
        self.calls += 1

    def merge(
        self, level: int, part: str, before: tuple[int, int, int], after: tuple[int, int], route: str = ""
    ) -> None:
        """A call merged. before: (batch, queries, keys) of the unmerged call; after: (queries, keys) left.

        route: how merged keys of a self-attention got to know their sizes, or did not; "" where they were not to.
        """
        batch, queries, keys = before
        if torch.compiler.is_compiling():
            self.trace_merge(index(level), part, index(queries), index(after[0]), index(after[1]))
            if route:
                self.trace_route(index(level), route)
            return
        tally = self.levels[level]
        if route:
            tally.routes[route] += 1
        tally.merged[(part, queries, *after)] += 1
        if part == "attn":
            tally.work_full += batch * queries * keys
            tally.work_left += batch * after[0] * after[1]

    def keep(self, level: int, work: int) -> None:
        """A self-attention was no part of what is merged in this call; work: as of `skip`."""
        if not torch.compiler.is_compiling():
            self.levels[level].work_full += work
            self.levels[level].work_left += work

    def skip(self, level: int, part: str, reason: str, work: int = 0, calls: int = 1) -> None:
        """Calls were left unmerged. work: batch times queries times keys of a self-attention, for each of them."""
        if torch.compiler.is_compiling():
            self.trace_skip(index(level), part, reason)
            return
        tally = self.levels[level]
        tally.skipped[part, reason] += calls
        tally.work_full += work * calls
        tally.work_left += work * calls

    @when_traced
    def trace_route(self, level: int, route: str) -> int:
        """A call is being compiled with the sizes taken this way."""
        self.levels[level].traced_routes.add(route)
        return 0

    @when_traced
    def trace_merge(self, level: int, part: str, tokens: int, queries: int, keys: int) -> int:
        """A call is being compiled as a merged one."""
        self.levels[level].traced_merges.add((part, tokens, queries, keys))
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


@dataclass(frozen=True)
class LevelReport:
    """One level. ``tokens``: (before, queries after, keys after) of each kind of merged self-attention call.

    mlp_tokens: (before, after) of each kind of merged call of a feed-forward layer.
    calls_merged, calls_skipped: calls of blocks' parts; reasons: skipped calls by reason.
    work_saved: share of the self-attention work (queries times keys) that was saved, None before any call.
    routes: how merged keys of self-attention got to know their sizes, and calls.
    traced_merges, traced_reasons, traced_routes: what a compiler was told while it traced; a compiled call is not
    counted.
    """

    level: int
    downsample: int
    blocks: int
    covered: bool
    tokens: tuple[tuple[int, int, int], ...]
    calls_merged: int
    calls_skipped: int
    reasons: dict[str, int]
    work_saved: float | None
    traced_merges: tuple[tuple[str, int, int, int], ...] = ()
    traced_reasons: tuple[str, ...] = ()
    routes: dict[str, int] = field(default_factory=dict)
    traced_routes: tuple[str, ...] = ()
    mlp_tokens: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Report:
    """What a patch did so far; ``str()`` of it is for people. ``calls``: calls of the UNet that were counted.

    gains: measurements that have decided whether its calls merge.
    """

    patched: bool
    settings: tuple[str, ...] = ()
    calls: int = 0
    levels: tuple[LevelReport, ...] = ()
    notes: tuple[str, ...] = ()
    gains: tuple[Gain, ...] = ()

    @property
    def merged_anything(self) -> bool:
        """True where at least one call was merged, or compiled as a merged one."""
        return any(level.calls_merged or level.traced_merges for level in self.levels)

    def __str__(self) -> str:
        if not self.patched and not self.levels:
            return "Token merging: not applied to this model."
        lines = [f"Token merging: {'; '.join(self.settings)} ({_count(self.calls, 'UNet call')})"]
        lines += [f"  measured: {gain}" for gain in self.gains]
        lines += [line for level in self.levels for line in _level_lines(level)]
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)


def _level_lines(level: LevelReport) -> list[str]:
    head = f"  level {level.level} (latent /{level.downsample}, {_count(level.blocks, 'block')})"
    if not level.covered:
        return [f"{head}: left alone, no rule covers it"]
    lines = []
    if level.calls_merged:
        lines.append(f"{head}: {_tokens_text(level)}{_count(level.calls_merged, 'call')} merged{_saved_text(level)}")
    elif not level.calls_skipped and (level.traced_merges or level.traced_reasons):
        lines.append(f"{head}: compiled, so calls are not counted")
    elif not level.calls_skipped:
        lines.append(f"{head}: will merge; no call counted yet")
    else:
        lines.append(f"{head}: nothing merged")
    lines += [f"    size-aware keys: {route}, {_count(n, 'call')}" for route, n in sorted(level.routes.items())]
    lines += [f"    skipped {_count(n, 'call')}: {reason}" for reason, n in sorted(level.reasons.items())]
    lines += [f"    compiled merging in {p}: {n} tokens -> {_sides(q, k or q)}" for p, n, q, k in level.traced_merges]
    lines += [f"    compiled with size-aware keys: {route}" for route in level.traced_routes]
    lines += [f"    compiled without merging, {reason}" for reason in level.traced_reasons]
    return lines


def _tokens_text(level: LevelReport) -> str:
    kinds = [f"{n} tokens -> {_sides(queries, keys)}" for n, queries, keys in level.tokens]
    kinds += [f"MLP {n} tokens -> {left}" for n, left in level.mlp_tokens]
    return "; ".join(kinds) + ", " if kinds else ""


def _sides(queries: int, keys: int) -> str:
    return str(queries) if queries == keys else f"{queries} queries x {keys} keys"


def _saved_text(level: LevelReport) -> str:
    return "" if level.work_saved is None else f", {level.work_saved:.0%} of the attention work saved"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def make_report(
    ledger: Ledger, covered: list[bool], settings: tuple[str, ...], patched: bool, notes: tuple[str, ...] = (),
    gains: tuple[Gain, ...] = (),
) -> Report:  # fmt: skip
    """The counts so far, as something that no longer changes. notes: beside the ledger's; gains: see `Report`."""
    levels = tuple(
        LevelReport(
            level=number,
            downsample=tally.downsample,
            blocks=tally.blocks,
            covered=covered[number],
            tokens=tuple(sorted({(n, q, k) for part, n, q, k in tally.merged if part == "attn"}, reverse=True)),
            calls_merged=sum(tally.merged.values()),
            calls_skipped=sum(tally.skipped.values()),
            reasons={f"{part}: {reason}": calls for (part, reason), calls in tally.skipped.items()},
            work_saved=1 - tally.work_left / tally.work_full if tally.work_full else None,
            traced_merges=tuple(sorted(tally.traced_merges)),
            traced_reasons=tuple(sorted(tally.traced_skips)),
            routes=dict(tally.routes),
            traced_routes=tuple(sorted(tally.traced_routes)),
            mlp_tokens=tuple(sorted({(n, left) for part, n, left, _ in tally.merged if part == "mlp"}, reverse=True)),
        )
        for number, tally in enumerate(ledger.levels)
    )
    return Report(patched, settings, ledger.calls, levels, (*ledger.notes, *notes), gains)
