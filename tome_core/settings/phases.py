"""An early phase is a rule of its own, before the one of a config that it precedes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..merging.methods import METHODS
from .config import EARLY_CELLS, MergeConfig
from .rule import MergeRule
from .schedule import reaches

_FEW_KEYS = 0.9  # from this ratio on a k-means step costs a tenth of a match at 0.5, and halves the error
_STEPS = 2


def plain_rules(config: MergeConfig, downsamples: Sequence[int]) -> tuple[MergeRule, ...]:
    """All that merges, as rules: before each of the config's own its early phase.

    downsamples: of each level, how many times smaller than the latent it is.
    """
    return tuple(one for rule in config.rules for one in (*_early(config, rule, downsamples), rule))


def early_rules(config: MergeConfig, downsamples: Sequence[int]) -> dict[MergeRule, MergeRule]:
    """Those of `plain_rules` that are an early phase, each with the rule of the config's own that it precedes."""
    return {one: rule for rule in config.rules for one in _early(config, rule, downsamples)}


def _early(config: MergeConfig, rule: MergeRule, downsamples: Sequence[int]) -> tuple[MergeRule, ...]:
    ratio = config.early_ratio
    if ratio is None or not rule.merge_attn or not reaches(rule, 0, downsamples[0]):
        return ()
    cell = next((side for side in EARLY_CELLS if ratio <= 1 - 1 / side**2), EARLY_CELLS[-1])
    refines = METHODS[rule.method].compares and rule.is_proportional and ratio >= _FEW_KEYS
    only = {"min_timestep": max(config.early_until, rule.min_timestep or 0.0), "max_downsample": None,
            "merge_crossattn": False, "merge_mlp": False}  # fmt: skip
    return (replace(rule, **only, ratio=ratio, sx=max(rule.sx, cell), sy=max(rule.sy, cell),
                    refine=max(rule.refine, _STEPS) if refines else rule.refine),)  # fmt: skip
