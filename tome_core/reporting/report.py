"""What was merged where, what it gained and saved, and why something was skipped: for programs and, as text, people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from . import report_text
from .gains import Gain
from .ledger import Ledger, LevelTally, Tally

FORMAT = 1  # of `Report.as_data`


class _Counted:
    """What is told of the counts of ``phases``: of one, of a level's, or of all levels'."""

    phases: tuple[PhaseReport, ...]

    @property
    def tokens(self) -> tuple[tuple[int, int, int], ...]:
        """(before, queries after, keys after) of each kind of merged self-attention call."""
        return _kinds((n, q, k) for phase in self.phases for part, n, q, k in phase.merged if part == "attn")

    @property
    def mlp_tokens(self) -> tuple[tuple[int, int], ...]:
        """(before, after) of each kind of merged call of a feed-forward layer."""
        return _kinds((n, left) for phase in self.phases for part, n, left, _ in phase.merged if part == "mlp")

    @property
    def calls_merged(self) -> int:
        """Calls of blocks' parts."""
        return sum(sum(phase.merged.values()) for phase in self.phases)

    @property
    def calls_skipped(self) -> int:
        """Calls of blocks' parts, or of whole blocks."""
        return sum(self.reasons.values())

    @property
    def reasons(self) -> dict[str, int]:
        """Skipped calls by "part: reason", the most frequent first."""
        return dict(_sum(phase.skipped for phase in self.phases).most_common())

    @property
    def routes(self) -> dict[str, int]:
        """The ways of proportional attention, and calls."""
        return dict(_sum(phase.sized_by for phase in self.phases).most_common())

    @property
    def work_saved(self) -> float | None:
        """Share of the self-attention work (queries times keys) that was saved, None before any call."""
        full = sum(phase.work_full for phase in self.phases)
        return 1 - sum(phase.work_left for phase in self.phases) / full if full else None


@dataclass(frozen=True)
class PhaseReport(_Counted):
    """A level in one phase. name: "early" or "late"; "" where no rule has an early phase, or the time is not known.

    merged, skipped, sized_by, work_full, work_left: as of `ledger.Tally`, but skipped by "part: reason".
    """

    name: str
    merged: Mapping[tuple[str, int, int, int], int]
    skipped: Mapping[str, int]
    sized_by: Mapping[str, int]
    work_full: int
    work_left: int

    @property
    def phases(self) -> tuple[PhaseReport, ...]:
        """Itself."""
        return (self,)


@dataclass(frozen=True)
class LevelReport(_Counted):
    """One level, in all phases. level: counted from the finest. covered: can a rule merge here at some time?

    traced: why attentions were compiled without merging, which no call of them counts.
    """

    level: int
    downsample: int
    blocks: int
    covered: bool
    phases: tuple[PhaseReport, ...] = ()
    traced: tuple[str, ...] = ()


@dataclass(frozen=True)
class Report(_Counted):
    """What a patch did so far; ``str()`` of it is for people. ``calls``: calls of the UNet that were counted.

    Its counts, such as ``work_saved`` and ``reasons``, are those of all levels.
    gains: measurements of calls of these sizes, by which rules go that are to merge only where it pays.
    """

    patched: bool
    settings: tuple[str, ...] = ()
    calls: int = 0
    levels: tuple[LevelReport, ...] = ()
    notes: tuple[str, ...] = ()
    gains: tuple[Gain, ...] = ()

    @classmethod
    def join(cls, reports: Iterable[Report]) -> Report:
        """One on all of them: a picture's passes, its models. Levels are the same where they are down-sampled alike."""
        reports = tuple(reports)
        levels: dict[int, list[LevelReport]] = {}
        for level in (level for report in reports for level in report.levels):
            levels.setdefault(level.downsample, []).append(level)
        return cls(
            any(report.patched for report in reports), _once(report.settings for report in reports),
            sum(report.calls for report in reports),
            tuple(_join(number, levels[downsample]) for number, downsample in enumerate(sorted(levels))),
            _once(report.notes for report in reports), _once(report.gains for report in reports),
        )  # fmt: skip

    @property
    def merged_anything(self) -> bool:
        """True if at least one call was merged."""
        return any(level.calls_merged for level in self.levels)

    @property
    def phases(self) -> tuple[PhaseReport, ...]:
        """Of all levels, the finest first."""
        return tuple(phase for level in self.levels for phase in level.phases)

    @property
    def headline(self) -> str:
        """All in one line, for a log: ``1.42 times as fast (measured), 61 % of attention left out``."""
        return report_text.headline(self)

    def lines(self, title: str = "Token merging", facts: Sequence[str] | None = None, beside: Sequence[str] = ()) \
            -> list[str]:  # fmt: skip
        """For people, at most `report_text.MOST_LINES` of them; no line ends in a newline.

        The gain in time where it was measured, then what was left out where, then each level, early and late apart,
        then why the rest was not merged. facts: the host's own for the first line, in place of the calls of the UNet.
        beside: lines of the host's own, after the first two.
        """
        return report_text.lines(self, title, facts, beside)

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def as_data(self) -> dict[str, Any]:
        """All of it in JSON's own types, with the number of its format; shares from 0 to 1, sizes in latent tokens."""
        return {
            "format": FORMAT, "patched": self.patched, "settings": list(self.settings), "calls": self.calls,
            "work_saved": self.work_saved, "gains": [{**gain.as_data(), "ratio": gain.ratio} for gain in self.gains],
            "levels": [_level_data(level) for level in self.levels], "notes": list(self.notes),
        }  # fmt: skip


def _join(number: int, levels: Sequence[LevelReport]) -> LevelReport:
    phases: dict[str, list[PhaseReport]] = {}
    for phase in (phase for level in levels for phase in level.phases):
        phases.setdefault(phase.name, []).append(phase)
    return replace(
        levels[0], level=number, blocks=max(level.blocks for level in levels),
        covered=any(level.covered for level in levels),
        phases=tuple(
            PhaseReport(name, _sum(one.merged for one in same), _sum(one.skipped for one in same),
                _sum(one.sized_by for one in same), sum(one.work_full for one in same),
                sum(one.work_left for one in same))
            for name, same in phases.items()
        ),
        traced=_once(level.traced for level in levels),
    )  # fmt: skip


def _level_data(level: LevelReport) -> dict[str, Any]:
    return {
        "level": level.level, "downsample": level.downsample, "blocks": level.blocks, "covered": level.covered,
        "work_saved": level.work_saved,
        "phases": [
            {"name": phase.name, "work_saved": phase.work_saved, "merged": _merged_data(phase.merged),
             "skipped": dict(phase.skipped), "sized_by": dict(phase.sized_by)}
            for phase in level.phases
        ],
        "traced": list(level.traced),
    }  # fmt: skip


def _merged_data(kinds: Mapping[tuple[str, int, int, int], int]) -> list[dict[str, Any]]:
    return [
        {"part": part, "tokens": tokens, "queries": queries, "keys": keys or None, "calls": calls}
        for (part, tokens, queries, keys), calls in kinds.items()
    ]


def _kinds(found: Iterable[tuple]) -> tuple:
    return tuple(sorted(set(found), reverse=True))


def _sum(counts: Iterable[Mapping]) -> Counter:
    whole: Counter = Counter()
    for one in counts:
        whole.update(one)
    return whole


def _once(several: Iterable[Iterable[Any]]) -> tuple:
    return tuple(dict.fromkeys(one for some in several for one in some))


def make_report(
    ledger: Ledger, covered: list[bool], settings: tuple[str, ...], patched: bool, notes: tuple[str, ...] = (),
    gains: tuple[Gain, ...] = (),
) -> Report:  # fmt: skip
    """The counts so far, as something that no longer changes. notes: beside the ledger's; gains: see `Report`."""
    levels = tuple(_level(number, tally, covered[number]) for number, tally in enumerate(ledger.levels))
    return Report(patched, settings, ledger.calls, levels, (*ledger.notes, *notes), gains)


def _level(number: int, tally: LevelTally, covered: bool) -> LevelReport:
    return LevelReport(
        number, tally.downsample, tally.blocks, covered,
        tuple(_phase(name, tally.phases[name]) for name in sorted(tally.phases)),  # "", early, late
        tuple(sorted(tally.traced)),
    )  # fmt: skip


def _phase(name: str, tally: Tally) -> PhaseReport:
    skipped = {f"{part}: {reason}": calls for (part, reason), calls in tally.skipped.items()}
    return PhaseReport(name, dict(tally.merged), skipped, dict(tally.routes), tally.work_full, tally.work_left)
