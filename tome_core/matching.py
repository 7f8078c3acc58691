"""The plans of one block: matched from its input, or kept over steps."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from .attention.core import Whole, correction_of, projected
from .attention.correction import Correction, Pair
from .config import MergeRule
from .grid import Draw
from .keep import Kept, KeptPlans, Shared
from .methods import METHODS, MatchOptions
from .methods.bipartite import refined
from .metric import BY_DISTANCE, compared
from .plan import MergePlan
from .run import GridCall

# of queries, keys and values merged together in an attention whose inside is not known: more loses too much
_TOGETHER_RATIO, _TOGETHER_CELL = 0.5, 2


class Plans(NamedTuple):
    """What one match found: the plan, the queries' own where they have one, and what the plan's correction is.

    merged: keys and values ``[B, G, H*d]`` of the very call that matched, where its match has made them.
    """

    plan: MergePlan | None
    queries: MergePlan | None = None
    correction: Correction | None = None
    merged: Pair | None = None


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
        if kept is None or not rule.keep or torch.compiler.is_compiling():  # what may be kept there, a graph asks for
            return self._new(asked, _made(asked), None)
        key, device = self._key(asked, outer.batch), asked.x.device
        old = kept.find(key, rule, device, _renews(asked))
        if old is not None and old.is_fresh:
            return old.kept.plans
        shared, since = kept.look(), None
        if shared is not None and outer.batch % shared.copies == 0:
            plans, since = self._shared(asked, kept, shared)
        else:
            plans = self._new(asked, _made(asked), old and old.kept.plans)
        kept.store(key, plans._replace(merged=None), rule, device, since=since)
        return plans

    def _key(self, asked: Asked, batch: int) -> tuple:
        return (self.number, asked.part, asked.together, batch, asked.outer.grid)

    def _shared(self, asked: Asked, kept: KeptPlans, shared: Shared) -> tuple[Plans, Kept]:
        """The match of one copy of the latents serves all of them, in this call and in others at its time.

        Guidance multiplies the difference of two predictions, and so how differently merging has changed them. A batch
        that its host cuts gets what the whole one gets, where the copy that is matched comes first.
        """
        outer, rule, device, made = asked.outer, asked.rule, asked.x.device, _made(asked)
        count = outer.batch // shared.copies
        key, rows = self._key(asked, count), slice(shared.matched * count, (shared.matched + 1) * count)
        old = kept.find(key, rule, device, _renews(asked), shared)
        if old is not None and old.is_fresh:
            match = old.kept
        else:
            matched = asked._replace(x=asked.x[rows])
            rows_made = None if made is None else tuple(one[rows] for one in made)
            groups = self.groups(matched, rows_made, old and old.kept.plans)
            match = kept.store(key, groups, rule, device, shared)
        return _corrected(asked, _of_copies(match.plans, shared.copies), made), match

    def _new(self, asked: Asked, made: Pair | None, old: Plans | None) -> Plans:
        return _corrected(asked, self.groups(asked, made, old), made)

    def groups(self, asked: Asked, made: Pair | None, old: Plans | None) -> Plans:
        """A match without its correction. old: of an earlier time."""
        rule = asked.rule
        if asked.together and rule.effective_side != "qkv":
            return Plans(self._match_as_tomesd(asked))
        if _renews(asked) and old is not None and old.plan is not None:
            plan = self._renewed(asked, made, old.plan)
        else:
            plan = self._match(asked, made)
        return Plans(plan) if plan is None else Plans(plan, self._match_queries(asked))

    def _match(self, asked: Asked, made: Pair | None) -> MergePlan | None:
        rule = asked.rule
        options = MatchOptions(
            rule.constant_ratio, rule.sx, rule.sy, self._draw(asked), rule.cluster_on,
            0 if asked.together else rule.refine, rule.metric in BY_DISTANCE,
        )  # fmt: skip
        return METHODS[rule.method].match(_compared(asked, made), asked.outer.grid, options)

    def _renewed(self, asked: Asked, made: Pair | None, old: MergePlan) -> MergePlan:
        """One k-means step from the plan of an earlier time is as good as a new match with several, and cheaper."""
        return refined(old, _compared(asked, made), 1, asked.rule.metric in BY_DISTANCE)

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


def _renews(asked: Asked) -> bool:
    """Is a plan that is too old where the next match begins?"""
    return bool(asked.rule.refine) and not asked.together and METHODS[asked.rule.method].compares


def _of_copies(plans: Plans, copies: int) -> Plans:
    """The plans of ``[P, N, C]`` for ``[copies * P, N, C]``; of one picture they serve any number."""
    return Plans(*(None if one is None else one.repeated(copies) for one in plans[:2]))


def _corrected(asked: Asked, plans: Plans, made: Pair | None) -> Plans:
    if made is None or plans.plan is None:
        return plans
    found = correction_of(asked.whole, made, plans.plan, asked.outer.grid)
    return plans._replace(correction=found.correction, merged=found.merged)


def _made(asked: Asked) -> Pair | None:
    """Keys and values of all tokens, where a correction needs them."""
    return None if asked.whole is None else projected(asked.whole)


def _compared(asked: Asked, made: Pair | None) -> torch.Tensor:
    """A method that does not compare by a metric gets the block's input."""
    rule = asked.rule
    return compared(asked.block, asked.x, rule.metric, made) if METHODS[rule.method].compares else asked.x


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
