"""The plans of one block: matched from its input, or kept over steps."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from .attention.core import Whole, correction_of, projected
from .attention.correction import Correction
from .config import MergeRule
from .grid import Draw
from .keep import Kept
from .methods import METHODS, MatchOptions
from .methods.bipartite import refined
from .metric import BY_DISTANCE, Made, compared
from .plan import MergePlan
from .run import GridCall

# of queries, keys and values merged together in an attention whose inside is not known: more loses too much
_TOGETHER_RATIO, _TOGETHER_CELL = 0.5, 2


class Plans(NamedTuple):
    """What one match found: the plan, the queries' own where they have one, and what the plan's correction is."""

    plan: MergePlan | None
    queries: MergePlan | None = None
    correction: Correction | None = None


class Matcher:
    """Finds the plans of one block. number: the block's among all of the UNet; level: its own. Holds no module."""

    def __init__(self, number: int, level: int) -> None:
        self.number = number
        self.level = level

    def find(
        self, block: nn.Module, x: torch.Tensor, outer: GridCall, rule: MergeRule, part: str, together: bool,
        whole: Whole | None = None,
    ) -> Plans:  # fmt: skip
        """The plans of a part for the block's input ``x``. together, whole: see `BlockCall.plans_for`."""
        kept = outer.call.kept
        if kept is None or not rule.keep or torch.compiler.is_compiling():
            return self._match(block, x, outer, rule, together, whole)
        key = (self.number, kept.ordinal, part, together, outer.batch, outer.grid)
        old = kept.plans.get(key)
        if old is not None and (old.rule is not rule or not _fits(old.plans, x)):
            old = None
        if old is not None and abs(old.timestep - kept.timestep) <= rule.keep:
            return old.plans
        if old is None:
            plans = self._match(block, x, outer, rule, together, whole)
        else:
            plans = self._renewed(old.plans, block, x, outer, rule, together, whole)
        kept.plans[key] = Kept(plans, kept.timestep, rule)
        return plans

    def _renewed(
        self, old: Plans, block: nn.Module, x: torch.Tensor, outer: GridCall, rule: MergeRule, together: bool,
        whole: Whole | None,
    ) -> Plans:  # fmt: skip
        """One k-means step from the plan of an earlier time is as good as a new match with several, and cheaper."""
        if not rule.refine or together or old.plan is None or not METHODS[rule.method].compares:
            return self._match(block, x, outer, rule, together, whole)
        made = None if whole is None else projected(whole)
        plan = refined(old.plan, self._compared(block, x, rule, made), 1, rule.metric in BY_DISTANCE)
        return self._complete(plan, x, outer, rule, whole, made)

    def _match(
        self, block: nn.Module, x: torch.Tensor, outer: GridCall, rule: MergeRule, together: bool,
        whole: Whole | None,
    ) -> Plans:  # fmt: skip
        if together and rule.effective_side != "qkv":
            return Plans(self._match_as_tomesd(x, outer, rule))
        made = None if whole is None else projected(whole)
        options = MatchOptions(
            rule.constant_ratio, rule.sx, rule.sy, self._draw(x, outer, rule), rule.cluster_on,
            0 if together else rule.refine, rule.window, rule.metric in BY_DISTANCE,
        )  # fmt: skip
        plan = METHODS[rule.method].match(self._compared(block, x, rule, made), outer.grid, options)
        return Plans(None) if plan is None else self._complete(plan, x, outer, rule, whole, made)

    def _complete(
        self, plan: MergePlan, x: torch.Tensor, outer: GridCall, rule: MergeRule, whole: Whole | None,
        made: Made | None,
    ) -> Plans:  # fmt: skip
        correction = None if made is None else correction_of(whole, *made, plan, outer.grid)
        return Plans(plan, self._match_queries(x, outer, rule), correction)

    def _match_as_tomesd(self, x: torch.Tensor, outer: GridCall, rule: MergeRule) -> MergePlan | None:
        """For a rule made for keys and values alone: tokens by cosine, no empty groups, and not too many merged."""
        ratio, cell = min(rule.constant_ratio, _TOGETHER_RATIO), _TOGETHER_CELL
        options = MatchOptions(ratio, min(rule.sx, cell), min(rule.sy, cell), self._draw(x, outer, rule))
        return METHODS["bipartite"].match(x, outer.grid, options)

    def _compared(self, block: nn.Module, x: torch.Tensor, rule: MergeRule, made: Made | None) -> torch.Tensor:
        """A method that does not compare by a metric gets the block's input."""
        return compared(block, x, rule.metric, rule.project, made) if METHODS[rule.method].compares else x

    def _match_queries(self, x: torch.Tensor, outer: GridCall, rule: MergeRule) -> MergePlan | None:
        if not rule.query_ratio:
            return None
        options = MatchOptions(rule.query_ratio, 2, 2, self._draw(x, outer, rule), window=rule.window)
        return METHODS["bipartite"].match(x, outer.grid, options)

    def _draw(self, x: torch.Tensor, outer: GridCall, rule: MergeRule) -> Draw | None:
        return Draw(rule.seed, self.level, _stamp(outer.call.stamp, x)) if rule.use_rand else None


def _fits(plans: Plans, x: torch.Tensor) -> bool:
    return plans.plan is None or plans.plan.group.device == x.device


def _stamp(time: Any, x: torch.Tensor) -> torch.Tensor | None:
    """The timestep of each sample of ``x`` as a tensor ``[1]`` or ``[B]``; video models pass one for several frames."""
    if time is None:
        return None
    if not torch.is_tensor(time):
        return torch.full((1,), float(time), dtype=torch.float32, device=x.device)
    time = time.detach().reshape(-1)
    batch, count = x.shape[0], time.shape[0]
    if count in (1, batch):
        return time
    return time.repeat_interleave(batch // count) if batch % count == 0 else time[:1]
