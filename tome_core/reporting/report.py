"""What was merged where, what it gained and saved, and why something was skipped: for programs and, as text, people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .gains import Gain
from .ledger import OTHER_PARTS, TOO_SMALL, Counted, LevelTally

FORMAT = 2  # of `Report.as_data`
_KINDS = 3  # of token counts at a level, of reasons, and of sizes that were measured, that are told
_COUNTS = 0.05  # a smaller share of attention is worth no line
_AS_ASKED = ("outside the rules' time range", "so few tokens", "the card is so fast", "measured: ", "a rule of ratio 0",
             "the picture is smaller", OTHER_PARTS, TOO_SMALL)  # fmt: skip
_NOTHING_WILL = "nothing will merge: "  # how a note begins that says why


@dataclass(frozen=True)
class Report(Counted):
    """What a patch did so far; ``str()`` of it is for people. ``calls``: calls of the UNet that were counted.

    Its counts, such as ``work_saved`` and ``reasons``, are those of all levels.
    gains: measurements of calls of these sizes, by which rules go that are to merge only where it pays. own: what
    people's own pictures say, which is told where no measurement is of such calls.
    """

    patched: bool
    settings: tuple[str, ...] = ()
    calls: int = 0
    levels: tuple[LevelTally, ...] = ()
    notes: tuple[str, ...] = ()
    gains: tuple[Gain, ...] = ()
    own: str = ""

    @classmethod
    def join(cls, reports: Iterable[Report]) -> Report:
        """One on all of them: a picture's passes, its models. Levels are the same where they are down-sampled alike."""
        reports = tuple(reports)
        levels: dict[int, LevelTally] = {}
        for level in (level for report in reports for level in report.levels):
            known = levels.get(level.downsample)
            levels[level.downsample] = level if known is None else known + level
        return cls(
            any(report.patched for report in reports), _once(report.settings for report in reports),
            sum(report.calls for report in reports),
            tuple(replace(levels[downsample], level=number) for number, downsample in enumerate(sorted(levels))),
            _once(report.notes for report in reports), _once(report.gains for report in reports),
        )  # fmt: skip

    @property
    def merged_anything(self) -> bool:
        """True if at least one call was merged."""
        return self.calls_merged > 0

    @property
    def headline(self) -> str:
        """``about 1.4x faster (measured here)``, else ``61% of attention left out``, or why nothing merged."""
        return (self._speed() or [self._outcome()])[0]

    @property
    def hindered(self) -> str:
        """What was to merge and could not, if it is a share that counts: ``9% of attention not merged: ...``; else "".

        What the settings leave alone, or what would not pay, is as it was asked for.
        """
        full, lost = self.work[0], self._sum("lost")
        found = [f"{percent(lost[one] / full)} of attention not merged: {_why(one)}" for one in self.reasons
                 if full and lost[one] / full >= _COUNTS and not _why(one).startswith(_AS_ASKED)]  # fmt: skip
        return found[0] if found and self.merged_anything else ""

    def lines(self, title: str = "Token merging", facts: Sequence[str] | None = None, beside: Sequence[str] = ()) \
            -> list[str]:  # fmt: skip
        """For people; no line ends in a newline.

        The gain in time where it was measured, then what was left out where, then each level, then why the rest was
        not merged. facts: the host's own for the first line, in place of the calls of the UNet.
        beside: lines of the host's own, after the first two.
        """
        if not self.patched and not self.levels:
            return [f"{title}: not applied to this model."]
        facts = [count(self.calls, "model call")] if facts is None else facts
        speed, outcome = self._speed(), self._outcome()
        places = " and ".join(f"/{level.downsample}" for level in self.levels if level.calls_merged)
        more = [f"{outcome}, at latent {places}"] if speed else []
        more += beside
        more += [f"latent /{level.downsample}: {_kinds_text(level)}" for level in self.levels if level.calls_merged]
        reasons = list(self.reasons.items())[not self.merged_anything : _KINDS]  # the first is in the outcome
        more += [f"not merged, {count(calls, 'call')}: {_why(reason)}" for reason, calls in reasons]
        more += [f"compiled without merging, {reason}" for reason in self._traced()]
        more += [*self.notes, *(f"settings: {one}" for one in self.settings)]
        return [f"{title}: {', '.join(filter(None, [*facts, *(speed or [outcome])]))}", *(f"  {one}" for one in more)]

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def as_data(self) -> dict[str, Any]:
        """All of it in JSON's own types, with the number of its format; shares from 0 to 1, sizes in latent tokens."""
        return {
            "format": FORMAT, "patched": self.patched, "settings": list(self.settings), "calls": self.calls,
            "work_saved": self.work_saved, "gains": [{**gain._asdict(), "ratio": gain.ratio} for gain in self.gains],
            "levels": [_level_data(level) for level in self.levels], "notes": list(self.notes),
        }  # fmt: skip

    def _traced(self) -> tuple[str, ...]:
        return _once(sorted(level.traced) for level in self.levels)

    def _speed(self) -> list[str]:
        """``about 1.4x faster (measured here)``, of several sizes each; nothing where that is not known of a picture.

        What was measured is not told of calls in which something else was left out, see `Gain.is_of`.
        """
        gains = [gain for gain in self.gains if gain.is_of(self.work_saved)][-_KINDS:]
        if not gains or not self.merged_anything:
            return [self.own] if self.own and self.merged_anything else []
        sizes = [gain.speed + (f" at {gain.size}" if len(gains) > 1 else "") for gain in gains]
        return [f"{', '.join(sizes)} (measured here)"]

    def _outcome(self) -> str:
        if self.merged_anything:
            return f"{percent(self.work_saved)} of attention left out" if self.work_saved else "attention left whole"
        why = [*map(_why, self.reasons), *self._traced(),
               *(note.removeprefix(_NOTHING_WILL) for note in self.notes if note.startswith(_NOTHING_WILL)),
               "no call counted yet" if self.patched else "it is not on the model"]  # fmt: skip
        return f"nothing merged: {why[0]}"


def percent(share: float) -> str:
    """``61%``, never 100 where something is left."""
    return f"{min(share, 0.99 if share < 1 else 1.0):.0%}"


def count(number: int, noun: str) -> str:
    """``1 step``, ``2 steps``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _once(several: Iterable[Iterable[Any]]) -> tuple:
    return tuple(dict.fromkeys(one for some in several for one in some))


def _level_data(level: LevelTally) -> dict[str, Any]:
    merged = [{"part": part, "tokens": tokens, "queries": queries, "keys": keys or None, "calls": calls}
              for (part, tokens, queries, keys), calls in level.merged.items()]  # fmt: skip
    return {"level": level.level, "downsample": level.downsample, "blocks": level.blocks, "covered": level.covered,
            "work_saved": level.work_saved, "merged": merged, "sized_by": dict(level.sized_by),
            "skipped": dict(level.skipped), "traced": sorted(level.traced),
            "skipped_work": {why: work / level.work_full for why, work in level.lost.items() if work}}  # fmt: skip


def _kinds_text(level: LevelTally) -> str:
    """``4096 tokens -> 64 or 640 keys, 98% left out``."""
    sides: dict[int, list[str]] = {}
    for tokens, queries, keys in level.tokens:
        sides.setdefault(tokens, []).append(str(keys) if queries == keys else f"{keys} keys")
    kinds = [f"{tokens} tokens -> {' or '.join(left)}" for tokens, left in sides.items()]
    kinds += [f"MLP {tokens} tokens -> {left}" for tokens, left in level.mlp_tokens]
    if len(kinds) > _KINDS:
        kinds[_KINDS:] = [f"{len(kinds) - _KINDS} other sizes"]
    saved = f", {percent(level.work_saved)} left out" if level.work_saved else ""
    return f"{'; '.join(kinds) or count(level.calls_merged, 'call') + ' merged'}{saved}"


def _why(reason: str) -> str:
    """Without the part of a block, unless that is another than its self-attention, which everybody merges."""
    part, _, why = reason.partition(": ")
    return why if part in ("attn", "block") else reason
