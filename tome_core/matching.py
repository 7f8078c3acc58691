"""The plans of one block: matched from its input, shared with its level's other blocks, or kept over steps."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from .config import MergeRule
from .grid import Draw
from .keep import Kept
from .methods import METHODS, MatchOptions
from .methods.bipartite import refined
from .metric import BY_DISTANCE, compared
from .plan import MergePlan
from .runtime import GridCall

# keys and values that cannot know their sizes: at this ratio and cell the sizes do nothing, beyond it they are
# everything (measured on a trained model: .9375 in 4x4 cells 2.6 to 14 times worse without them)
_UNSIZED_RATIO, _UNSIZED_CELL = 0.75, 2


class Plans(NamedTuple):
    """What one match found: the plan, and the queries' own where they have one."""

    plan: MergePlan | None
    queries: MergePlan | None


class Matcher:
    """Finds the plans of one block. number: the block's among all of the UNet; level: its own."""

    def __init__(self, block: nn.Module, number: int, level: int) -> None:
        self.block = block
        self.number = number
        self.level = level

    def find(self, x: torch.Tensor, outer: GridCall, rule: MergeRule, part: str, unsized: bool) -> Plans:
        """The plans of a part for the block's input ``x``. unsized: its keys cannot know their sizes."""
        key = (part, unsized, outer.batch, outer.grid.height, outer.grid.width)
        if rule.share == "call":
            place = (self.level, *key)
            plans = outer.call.plans.get(place)
            if plans is None or not _fits(plans, x):
                plans = outer.call.plans[place] = self._match(x, outer, rule, unsized)
            return plans
        # a block that is compiled by itself gets kept plans from outside, and would have a graph for each of them
        if rule.keep and not torch.compiler.is_compiling() and outer.call.kept is not None:
            return self._keep(x, outer, rule, unsized, (self.number, outer.call.kept.ordinal, *key))
        return self._match(x, outer, rule, unsized)

    def _keep(self, x: torch.Tensor, outer: GridCall, rule: MergeRule, unsized: bool, key: tuple) -> Plans:
        """What an earlier step matched: as it is, or where it is too old, renewed."""
        kept = outer.call.kept
        old = kept.plans.get(key)
        if old is None or old.rule is not rule or not _fits(old.plans, x):
            plans = self._match(x, outer, rule, unsized)
        elif abs(old.timestep - kept.timestep) <= rule.keep:
            return old.plans
        else:
            plans = self._renewed(old.plans, x, outer, rule, unsized)
        kept.plans[key] = Kept(plans, kept.timestep, rule)
        return plans

    def _renewed(self, old: Plans, x: torch.Tensor, outer: GridCall, rule: MergeRule, unsized: bool) -> Plans:
        """One k-means step from the plan of an earlier time is as good as a new match with several, and cheaper."""
        if not rule.refine or unsized or old.plan is None or not METHODS[rule.method].compares:
            return self._match(x, outer, rule, unsized)
        plan = refined(old.plan, self._compared(x, rule), 1, rule.metric in BY_DISTANCE)
        return Plans(plan, self._match_queries(x, outer, rule))

    def _match(self, x: torch.Tensor, outer: GridCall, rule: MergeRule, unsized: bool) -> Plans:
        options = MatchOptions(
            rule.constant_ratio, rule.sx, rule.sy, self._draw(x, outer, rule), rule.cluster_on, rule.refine,
            rule.window, rule.metric in BY_DISTANCE,
        )  # fmt: skip
        if unsized:
            options = _unsized(options, rule.effective_side)
        plan = METHODS[rule.method].match(self._compared(x, rule), outer.grid, options)
        return Plans(plan, None if plan is None else self._match_queries(x, outer, rule))

    def _compared(self, x: torch.Tensor, rule: MergeRule) -> torch.Tensor:
        """A method that does not compare by a metric gets the block's input."""
        return compared(self.block, x, rule.metric, rule.project) if METHODS[rule.method].compares else x

    def _match_queries(self, x: torch.Tensor, outer: GridCall, rule: MergeRule) -> MergePlan | None:
        if not rule.query_ratio:
            return None
        options = MatchOptions(rule.query_ratio, 2, 2, self._draw(x, outer, rule), window=rule.window)
        return METHODS["bipartite"].match(x, outer.grid, options)

    def _draw(self, x: torch.Tensor, outer: GridCall, rule: MergeRule) -> Draw | None:
        return Draw(rule.seed, self.level, _stamp(outer.call.stamp, x)) if rule.use_rand else None


def _fits(plans: Plans, x: torch.Tensor) -> bool:
    return plans.plan is None or plans.plan.group.device == x.device


def _unsized(options: MatchOptions, side: str) -> MatchOptions:
    """What keys that cannot know their sizes bear: no empty groups, and alone only so much."""
    options = options._replace(refine=0)
    if side != "kv":
        return options
    return options._replace(
        ratio=min(options.ratio, _UNSIZED_RATIO), sx=min(options.sx, _UNSIZED_CELL), sy=min(options.sy, _UNSIZED_CELL)
    )


def _stamp(time: Any, x: torch.Tensor) -> torch.Tensor | None:
    """The timestep of each sample of ``x`` as a tensor ``[1]`` or ``[B]``; video models pass one for several frames."""
    if time is None:
        return None
    if not torch.is_tensor(time):
        return torch.full((1,), float(time), device=x.device)
    time = time.detach().reshape(-1)
    batch, count = x.shape[0], time.shape[0]
    if count in (1, batch):
        return time
    return time.repeat_interleave(batch // count) if batch % count == 0 else time[:1]
