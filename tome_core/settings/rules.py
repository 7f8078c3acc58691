"""Rules and the levels of a model: rules of early phases, what a rule reaches, which rule each part of a block gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from ..merging.methods import METHODS
from .config import MergeConfig, MergeRule

_EARLY_CELLS = (2, 4, 8)  # sides of cells: an early phase uses the smallest that allows its ratio
_HIGHEST_EARLY_RATIO = 1 - 1 / _EARLY_CELLS[-1] ** 2
_REFINED_FROM = 0.9  # from this ratio on a k-means step costs a tenth of a match at 0.5, and halves the error
_EARLY_REFINE = 2  # k-means steps of an early phase


def reaches(rule: MergeRule, level: int, downsample: int) -> bool:
    """Tell whether a rule reaches a level, by `downsample`, the latent cells per token along a side.

    If ``min_downsample`` and ``max_downsample``, both included, are None, it reaches level 0 alone, the finest.
    """
    low, high = rule.min_downsample, rule.max_downsample
    if low is None and high is None:
        return level == 0
    return (low is None or downsample >= low) and (high is None or downsample <= high)


def plain_rules(config: MergeConfig, downsamples: Sequence[int]) -> dict[MergeRule, MergeRule | None]:
    """Return a config's rules in order, as keys, with a rule for its early phase before each rule that has one.

    The value of an early phase's rule is the rule that follows it; other values are None. `downsamples` is latent cells
    per token, along a side, of each level of the model, the finest first.
    """
    return {plain: late for rule in config.rules
            for plain, late in ((_early(config, rule, downsamples), rule), (rule, None)) if plain}  # fmt: skip


def _early(config: MergeConfig, rule: MergeRule, downsamples: Sequence[int]) -> MergeRule | None:
    """Return the rule for a rule's early phase, for self-attention at level 0 alone; None if it has none."""
    ratio = config.early_ratio
    if ratio is None or not rule.merge_attn or not reaches(rule, 0, downsamples[0]):
        return None
    cell = next((side for side in _EARLY_CELLS if ratio <= 1 - 1 / side**2), _EARLY_CELLS[-1])
    refines = METHODS[rule.method].compares and rule.proportional and ratio >= _REFINED_FROM
    return replace(
        rule, ratio=ratio, sx=max(rule.sx, cell), sy=max(rule.sy, cell), max_downsample=None, merge_crossattn=False,
        merge_mlp=False, merge_blocks=False, min_timestep=max(config.early_until, rule.min_timestep or 0.0),
        refine=max(rule.refine, _EARLY_REFINE) if refines else rule.refine,
    )  # fmt: skip


class LevelRules(NamedTuple):
    """The rules that apply at one time and level of the model, by part of a block; None for a part without a rule."""

    attn: MergeRule | None = None
    crossattn: MergeRule | None = None
    mlp: MergeRule | None = None
    block: MergeRule | None = None  # whole blocks


def choose(rules: Sequence[MergeRule], downsamples: Sequence[int]) -> tuple[LevelRules, ...]:
    """Return for each level of the model the first rule that fits each part of a block.

    `rules` are those that hold at one time, in order. A rule that is off fits as well: it gives None, and later rules
    do not apply to its blocks. `downsamples` is latent cells per token, along a side, of each level, the finest first.
    """

    def first(level: int, downsample: int, part: str) -> MergeRule | None:
        setting = "merge_blocks" if part == "block" else f"merge_{part}"
        fitting = (rule for rule in rules if getattr(rule, setting) and reaches(rule, level, downsample))
        rule = next(fitting, None)
        return None if rule is None or rule.is_off else rule

    return tuple(LevelRules(*(first(level, downsample, part) for part in LevelRules._fields))
                 for level, downsample in enumerate(downsamples))  # fmt: skip


def ever_merges(rules: Sequence[MergeRule], level: int, downsample: int) -> bool:
    """Tell whether any rule that is on `reaches` a level, 0 for the finest, of `downsample` cells per token's side."""
    return any(not rule.is_off and reaches(rule, level, downsample) for rule in rules)


def ways_of(rules: Sequence[MergeRule], level: int, downsample: int) -> set[str]:
    """Return how rules that are on merge blocks of a level that they reach; empty if they merge keys and values alone.

    "tomesd": parts of blocks may be called with merged tokens, as by tomesd; "blocks": whole blocks may be.
    """
    ways: set[str] = set()
    for rule in rules:
        if not rule.is_off and reaches(rule, level, downsample):
            as_tomesd = rule.merge_crossattn or rule.merge_mlp or (rule.merge_attn and rule.is_as_tomesd)
            ways |= {"tomesd"} if as_tomesd else {"blocks"} if rule.merge_blocks else set()
    return ways


def notes_on(config: MergeConfig, is_reached: bool, downsamples: list[int]) -> tuple[str, ...]:
    """Return texts for the report: for each clamped ratio, and if nothing ever merges, though the config is on.

    `is_reached` tells whether a rule that is on reaches a level of the model.
    """
    notes = [f"ratio {rule.ratio:g} is more than its cells allow and became {rule.ratio_cap:g}: {rule.sx}x{rule.sy} "
             "tokens of which one stays; larger cells allow more"
             for rule in config.rules if rule.ratio > rule.ratio_cap]  # fmt: skip
    if config.early_ratio is not None and config.early_ratio > _HIGHEST_EARLY_RATIO:
        most = f"{_HIGHEST_EARLY_RATIO:g}"
        notes.append(f"early_ratio {config.early_ratio:g} is more than its cells allow and became {most}")
    if not is_reached and not config.is_off:
        have = ", ".join(f"/{d}" for d in downsamples)
        notes.append(f"nothing will merge: no rule reaches a level of this model, whose attention is at {have} of the "
                     "latent; leave max_downsample at None for the finest of them")
    return tuple(notes)
