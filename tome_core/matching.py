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
from .metric import BY_DISTANCE, compared
from .plan import MergePlan
from .run import GridCall

# of queries, keys and values merged together in an attention whose inside is not known: more loses too much
_TOGETHER_RATIO, _TOGETHER_CELL = 0.5, 2


class Plans(NamedTuple):
    """What one match found: the plan, the queries' own where they have one, and what the plan's correction is."""

    plan: MergePlan | None
    queries: MergePlan | None = None
    correction: Correction | None = None


class Asked(NamedTuple):
    """What a part asks for: plans for ``x``, the input ``[B, N, C]`` of its block, by a rule.

    together: for queries, keys and values at once, whose sizes are not to count, whatever the rule says. whole: the
    keys and values of all tokens, where what merging loses of them is to be corrected.
    """

    block: nn.Module
    x: torch.Tensor
    outer: GridCall
    rule: MergeRule
    part: str
    together: bool = False
    whole: Whole | None = None


class Matcher:
    """Finds the plans of one block. number: the block's among all of the UNet; level: its own. Holds no module."""

    def __init__(self, number: int, level: int) -> None:
        self.number = number
        self.level = level

    def find(self, asked: Asked) -> Plans:
        """A new match, or what is kept of the steps before."""
        outer, rule = asked.outer, asked.rule
        kept = outer.call.kept
        if kept is None or not rule.keep or torch.compiler.is_compiling():
            return self._match(asked)
        key = (self.number, kept.ordinal, asked.part, asked.together, outer.batch, outer.grid)
        old = kept.plans.get(key)
        if old is not None and (old.rule is not rule or not _fits(old.plans, asked.x)):
            old = None
        if old is not None and abs(old.timestep - kept.timestep) <= rule.keep:
            return old.plans
        plans = self._match(asked) if old is None else self._renewed(old.plans, asked)
        kept.plans[key] = Kept(plans, kept.timestep, rule)
        return plans

    def _renewed(self, old: Plans, asked: Asked) -> Plans:
        """One k-means step from the plan of an earlier time is as good as a new match with several, and cheaper."""
        rule = asked.rule
        if not rule.refine or asked.together or old.plan is None or not METHODS[rule.method].compares:
            return self._match(asked)
        made = _made(asked)
        return self._complete(asked, refined(old.plan, _compared(asked, made), 1, rule.metric in BY_DISTANCE), made)

    def _match(self, asked: Asked) -> Plans:
        rule, outer = asked.rule, asked.outer
        if asked.together and rule.effective_side != "qkv":
            return Plans(self._match_as_tomesd(asked))
        made = _made(asked)
        options = MatchOptions(
            rule.constant_ratio, rule.sx, rule.sy, self._draw(asked), rule.cluster_on,
            0 if asked.together else rule.refine, rule.metric in BY_DISTANCE,
        )  # fmt: skip
        plan = METHODS[rule.method].match(_compared(asked, made), outer.grid, options)
        return Plans(None) if plan is None else self._complete(asked, plan, made)

    def _complete(self, asked: Asked, plan: MergePlan, made: torch.Tensor | None) -> Plans:
        correction = None if made is None else correction_of(asked.whole, made, plan, asked.outer.grid)
        return Plans(plan, self._match_queries(asked), correction)

    def _match_as_tomesd(self, asked: Asked) -> MergePlan | None:
        """For a rule made for keys and values alone: tokens by cosine, no empty groups, and not too many merged."""
        rule, cell = asked.rule, _TOGETHER_CELL
        ratio = min(rule.constant_ratio, _TOGETHER_RATIO)
        options = MatchOptions(ratio, min(rule.sx, cell), min(rule.sy, cell), self._draw(asked))
        return METHODS["bipartite"].match(asked.x, asked.outer.grid, options)

    def _match_queries(self, asked: Asked) -> MergePlan | None:
        rule = asked.rule
        if not rule.query_ratio:
            return None
        options = MatchOptions(rule.query_ratio, 2, 2, self._draw(asked))
        return METHODS["bipartite"].match(asked.x, asked.outer.grid, options)

    def _draw(self, asked: Asked) -> Draw | None:
        rule = asked.rule
        return Draw(rule.seed, self.level, _stamp(asked.outer.call.stamp, asked.x)) if rule.use_rand else None


def _made(asked: Asked) -> torch.Tensor | None:
    """Keys and values of all tokens, where a correction needs them."""
    return None if asked.whole is None else projected(asked.whole)


def _compared(asked: Asked, made: torch.Tensor | None) -> torch.Tensor:
    """A method that does not compare by a metric gets the block's input."""
    rule = asked.rule
    return compared(asked.block, asked.x, rule.metric, made) if METHODS[rule.method].compares else asked.x


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
