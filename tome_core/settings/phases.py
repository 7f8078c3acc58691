"""An early phase and a deep MLP are rules of their own before those of a config, and a ramp is a few."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from ..merging.methods import METHODS
from .config import MergeConfig
from .rule import MergeRule
from .schedule import reaches

_CELLS = (2, 4, 8)
HIGHEST_EARLY_RATIO = 1 - 1 / _CELLS[-1] ** 2
# what merges the MLP alone, whatever the rest of its rule does; comparing keys and values is no better (.149 for .151)
_MLP = {"method": "bipartite", "sx": 2, "sy": 2, "side": "qkv", "merge_attn": False, "merge_crossattn": False,
        "merge_mlp": True, "metric": "input", "refine": 0, "query_ratio": 0.0}  # fmt: skip
_DEEP = 2  # down-sampled so much; half of the MLP's tokens cost trained models 11 % of the v-loss at 1, .16 at 2
DEEP_UNTIL = 500.0  # the timestep below which MLPs merge there: earlier steps decide what is drawn
_FEW_KEYS = 0.9  # from this ratio on a k-means step costs a tenth of a match at 0.5, and halves the error
_STEPS = 2


def plain_rules(config: MergeConfig, downsamples: Sequence[int]) -> tuple[MergeRule, ...]:
    """All that merges, as rules: before each of the config's own its deep MLP and its early phase.

    downsamples: of each level, how many times smaller than the latent it is.
    """
    return tuple(one for rule in config.rules
                 for one in (*_deep(config, rule, downsamples), *_early(config, rule, downsamples), rule))  # fmt: skip


def early_rules(config: MergeConfig, downsamples: Sequence[int]) -> dict[MergeRule, MergeRule]:
    """Those of `plain_rules` that are an early phase, each with the rule of the config's own that it precedes."""
    return {one: rule for rule in config.rules for one in _early(config, rule, downsamples)}


def _deep(config: MergeConfig, rule: MergeRule, downsamples: Sequence[int]) -> tuple[MergeRule, ...]:
    levels = tuple(level for level in _reach(rule, downsamples) if downsamples[level] >= _DEEP)
    ends = min(math.nextafter(DEEP_UNTIL, -1.0), math.inf if rule.max_timestep is None else rule.max_timestep)
    if not config.deep_mlp or not levels or ends < (rule.min_timestep or 0.0):
        return ()
    where = {"levels": levels, "max_downsample": None, "max_timestep": ends}
    return (replace(rule, **_MLP, **where, ratio=config.deep_mlp),)


def _reach(rule: MergeRule, downsamples: Sequence[int]) -> tuple[int, ...]:
    return tuple(level for level, down in enumerate(downsamples) if reaches(rule, level, down))


def _early(config: MergeConfig, rule: MergeRule, downsamples: Sequence[int]) -> tuple[MergeRule, ...]:
    ratio, reached = config.early_ratio, _reach(rule, downsamples)
    if ratio is None or not rule.merge_attn or not reached:
        return ()
    begins = max(config.early_until, rule.min_timestep or 0.0)
    if rule.max_timestep is not None and rule.max_timestep < begins:
        return ()
    cell = _cell_for(ratio)
    refines = METHODS[rule.method].compares and rule.is_proportional and ratio >= _FEW_KEYS
    only = {"min_timestep": begins, "levels": reached[:1], "max_downsample": None, "merge_crossattn": False,
            "merge_mlp": False}  # fmt: skip
    return (replace(rule, **only, ratio=ratio, sx=max(rule.sx, cell), sy=max(rule.sy, cell),
                    refine=max(rule.refine, _STEPS) if refines else rule.refine),)  # fmt: skip


def _cell_for(ratio: float) -> int:
    """The smallest cell side whose cap ``1 - 1/(side*side)`` allows the ratio; the largest where none does."""
    return next((side for side in _CELLS if ratio <= 1 - 1 / side**2), _CELLS[-1])


def ramp(rule: MergeRule, first: float, bands: int = 4) -> tuple[MergeRule, ...]:
    """Rules that bring the ratio from ``first`` at pure noise down, or up, to the rule's own at the picture.

    bands: equal parts of the 1000 timesteps, each with one ratio, because every ratio is a shape of its own. The
    first rule that holds counts, so all of them are needed, in this order. Raises ValueError for fewer than two, where
    the method has no ratio, or where the rule is already limited in time.

    >>> [one.ratio for one in ramp(MergeRule(ratio=0.5), 0.9, bands=3)]
    [0.9, 0.7, 0.5]
    """
    if bands < 2:
        raise ValueError(f"bands={bands!r} is no ramp; use 2 or more")
    if not METHODS[rule.method].uses_ratio:
        raise ValueError(f"method={rule.method!r} has no ratio to ramp, it follows from sx and sy; use another method")
    if rule.uses_time:
        raise ValueError("the rule is limited in time already; give ramp one that is not")
    rules = []
    for place in range(bands):
        ratio = round(first + (rule.ratio - first) * place / (bands - 1), 6)
        ends, cell = None if place == bands - 1 else 1000.0 * (1 - (place + 1) / bands), _cell_for(ratio)
        rules.append(replace(rule, ratio=ratio, sx=max(rule.sx, cell), sy=max(rule.sy, cell), min_timestep=ends))
    return tuple(rules)
