"""The report of a patch, as data and as text: merged calls by level, the gain, and reasons for unmerged calls."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .ledger import HARMLESS, Counted, LevelTally

FORMAT = 4  # version of `Report.as_data`
_KINDS = 3  # the most token counts at a level, and reasons, that are shown
_LEAST_SHOWN = 0.005  # a smaller share of the work that is left out is told as none
_COUNTS = 0.05  # a smaller share of the work is not shown
_NOTHING_WILL = "nothing will merge: "  # the beginning of notes with a reason


@dataclass(frozen=True)
class Report(Counted):
    """The report of a patch. ``str()`` gives it as text. Its figures, such as ``work_saved``, cover all levels."""

    patched: bool  # the patch is on the model
    settings: tuple[str, ...] = ()  # of the patch, as texts
    calls: int = 0  # of the model
    levels: tuple[LevelTally, ...] = ()  # the finest first
    notes: tuple[str, ...] = ()  # on clamped settings, and on reasons why nothing merges
    own: str = ""  # the gain in the user's own pictures, as text; "" if it is not known
    rest: int = 0  # the work outside blocks

    @classmethod
    def join(cls, reports: Iterable[Report]) -> Report:
        """Return one report for several, such as those of a picture's two samplings with hires fix.

        Calls, and counts of levels with the same down-sampling, are added. Settings and notes are kept once each;
        `own` is left out. `patched` is True if it is in any of the reports.
        """
        reports = tuple(reports)
        levels: dict[int, LevelTally] = {}
        for level in (level for report in reports for level in report.levels):
            known = levels.get(level.downsample)
            levels[level.downsample] = level if known is None else known + level
        return cls(
            any(report.patched for report in reports), _once(report.settings for report in reports),
            sum(report.calls for report in reports),
            tuple(replace(levels[downsample], level=number) for number, downsample in enumerate(sorted(levels))),
            _once(report.notes for report in reports), rest=sum(report.rest for report in reports),
        )  # fmt: skip

    @property
    def merged_anything(self) -> bool:
        """True if at least one call of a part of a block, such as a self-attention, was merged."""
        return self.calls_merged > 0

    @property
    def headline(self) -> str:
        """``38% less work``, with `own` behind it if that is known; or ``nothing merged: ...`` and why."""
        return ", ".join(filter(None, [self._outcome(), self.own if self.merged_anything else ""]))

    @property
    def hindered(self) -> str:
        """What should have merged and could not: ``20% of the work could not merge: ...``.

        It names at most two reasons, those with the most work, each with its share of all; shares below 5 % are left
        out. It is "" if nothing merged. What the settings exclude, or would not pay, is not included.
        """
        full, lost = self.work[0], self._sum("skipped_work")
        shares = {why: lost[why] / full for why in self.reasons if full and not _is_as_asked(why)}
        texts = [f"{percent(share)} of the work could not merge: {_why(why)}" for why, share in shares.items()
                 if share >= _COUNTS]  # fmt: skip
        return "; ".join(texts[:2]) if self.merged_anything else ""

    @property
    def hints(self) -> tuple[str, ...]:
        """The notes without those that say why nothing merges, which the headline tells."""
        return tuple(note for note in self.notes if not note.startswith(_NOTHING_WILL))

    def lines(self, title: str = "Token merging", facts: Sequence[str] | None = None, beside: Sequence[str] = ()) \
            -> list[str]:  # fmt: skip
        """Return the report as lines of text, all but the first indented; without a patch a single line, which says so.

        Args:
            title: the beginning of the first line.
            facts: texts for the first line, empty ones left out; None: the number of model calls.
            beside: the host's own lines, which follow the gain and the attention left out.
        """
        if not self.patched and not self.levels:
            return [f"{title}: there is no patch on this model."]
        facts = [count(self.calls, "model call")] if facts is None else facts
        more = [*beside, *(f"latent /{level.downsample}: {_kinds_text(level)}" for level in self.levels
                           if level.calls_merged)]  # fmt: skip
        reasons = self._reasons_by_cost()[not self.merged_anything : _KINDS]  # the first reason is in the headline
        nouns = {why: "whole block" if why.startswith("block: ") else "call" for why in reasons}
        more += [f"not merged, {count(self.reasons[why], nouns[why])}: {_why(why)}" for why in reasons]
        more += [f"compiled without merging, {reason}" for reason in self._traced()]
        more += [*self.notes, *(f"settings: {settings}" for settings in self.settings)]
        return [f"{title}: {', '.join(filter(None, [*facts, self.headline]))}", *(f"  {line}" for line in more)]

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def as_data(self) -> dict[str, Any]:
        """Return the report in JSON's types, without `own` and `rest`, with `FORMAT` as "format". Shares are 0 to 1."""
        return {
            "format": FORMAT, "patched": self.patched, "settings": list(self.settings), "calls": self.calls,
            "work_saved": self.work_saved, "levels": [_level_data(level) for level in self.levels],
            "notes": list(self.notes),
        }  # fmt: skip

    def _reasons_by_cost(self) -> list[str]:
        """Return the keys of `reasons`: what keeps whole blocks from merging first, what is as asked last."""
        return sorted(self.reasons, key=lambda why: (_is_as_asked(why), not why.startswith("block: ")))

    def _traced(self) -> tuple[str, ...]:
        """Return, each once, the reasons why attentions were compiled without merging, by level, sorted in each."""
        return _once(sorted(level.traced) for level in self.levels)

    def _outcome(self) -> str:
        """Return ``38% less work``, ``no less work`` below half a percent, or ``nothing merged:`` and the reason."""
        if self.merged_anything:
            saved = self.work_saved or 0.0
            return f"{percent(saved) if saved >= _LEAST_SHOWN else 'no'} less work"
        why = [*map(_why, self._reasons_by_cost()), *self._traced(),
               *(note.removeprefix(_NOTHING_WILL) for note in self.notes if note.startswith(_NOTHING_WILL)),
               "no call counted yet" if self.patched else "the patch is not on the model"]  # fmt: skip
        return f"nothing merged: {why[0]}"


def percent(share: float) -> str:
    """Format a share, 0 to 1, as ``61%``. A share below 1 never shows as ``100%``."""
    return f"{min(share, 0.99 if share < 1 else 1.0):.0%}"


def count(number: int, noun: str) -> str:
    """Format a number with its noun: ``1 step``, ``2 steps``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _once(several: Iterable[Iterable[Any]]) -> tuple:
    """Return the items of several collections, each item once, in the order of their first occurrence."""
    return tuple(dict.fromkeys(item for items in several for item in items))


def _level_data(level: LevelTally) -> dict[str, Any]:
    """Return a level's counts in JSON's types: lost work as shares of the level's, an MLP's number of keys as None."""
    merged = [{"part": part, "tokens": tokens, "queries": queries, "keys": keys or None, "calls": calls}
              for (part, tokens, queries, keys), calls in level.merged.items()]  # fmt: skip
    return {"level": level.level, "downsample": level.downsample, "blocks": level.blocks, "covered": level.covered,
            "errors": [{"part": part, "timestep": time, "share": share, "error": level.errors[part, time, share] / fits}
                       for (part, time, share), fits in level.fits.items()],  # mean over the level's fits
            "bounded": [{"part": part, "share": share, "calls": calls}
                        for (part, share), calls in level.bounded.items()],
            "work_saved": level.work_saved, "merged": merged, "sized_by": dict(level.sized_by),
            "skipped": dict(level.skipped), "traced": sorted(level.traced),
            "skipped_work": {why: work / max(work, level.work_full)
                             for why, work in level.skipped_work.items() if work}}  # fmt: skip


def _kinds_text(level: LevelTally) -> str:
    """Format a level's merged calls: ``4,096 tokens in 64 or 640 groups, 80% less work in these blocks``.

    Whole blocks and MLPs are named: ``whole blocks on 201 of 1,024 tokens``. More than three kinds are told as ranges.
    Cross-attentions alone give ``3 calls merged``.
    """
    groups = _kind_text("{tokens} tokens in {left} groups", [(tokens, keys) for tokens, _, keys in level.tokens])
    kinds = [groups.replace(" in 1 groups", " in 1 group")]
    kinds += [_kind_text("whole blocks on {left} of {tokens} tokens", level.block_tokens),
              _kind_text("MLP on {left} of {tokens} tokens", level.mlp_tokens)]  # fmt: skip
    saved = level.work_saved or 0.0
    less = f", {percent(saved)} less work in these blocks" if saved >= _LEAST_SHOWN else ""
    text = "; ".join(filter(None, kinds)) or f"{count(level.calls_merged, 'call')} merged"
    return f"{text}{less}{_bound_text(level)}"


def _bound_text(level: LevelTally) -> str:
    """Format how often a level kept more than its rules ask, such as ``; in 5 of 8 model calls ...``; "" if never."""
    texts = []
    for part, noun in (("attn", "keys"), ("block", "tokens")):
        shares = {share: calls for (of_part, share), calls in level.bounded.items() if of_part == part}
        if shares:
            whole = f" (all in {shares[1.0]})" if 1.0 in shares else ""
            texts.append(f"; merging changes this model much, so more {noun} were kept in "
                         f"{count(sum(shares.values()), 'model call')}{whole}")  # fmt: skip
    return "".join(texts)


def _kind_text(text: str, sizes: Sequence[tuple[int, int]]) -> str:
    """Fill in pairs (tokens, those left), a text for each number of tokens, as ranges if there are many; "" of none."""
    if not sizes:
        return ""
    by_tokens: dict[int, dict[int, None]] = {}
    for tokens, left in sizes:
        by_tokens.setdefault(tokens, {})[left] = None
    if len(by_tokens) <= _KINDS and all(len(left) <= _KINDS for left in by_tokens.values()):
        return "; ".join(text.format(tokens=f"{tokens:,}", left=" or ".join(f"{one:,}" for one in sorted(left)))
                         for tokens, left in by_tokens.items())  # fmt: skip
    tokens, left = (" to ".join(dict.fromkeys(f"{end(numbers):,}" for end in (min, max)))
                    for numbers in zip(*sizes, strict=True))  # fmt: skip
    return text.format(tokens=tokens, left=left)


def _is_as_asked(reason: str) -> bool:
    """Tell whether a `Report.reasons` key says that the settings exclude the part, or that merging would not pay."""
    return reason.partition(": ")[2].startswith(HARMLESS)


def _why(reason: str) -> str:
    """Return the reason in ``part: reason``, a `Report.reasons` key; the key if its part is not "attn" or "block"."""
    part, _, why = reason.partition(": ")
    return why if part in ("attn", "block") else reason
