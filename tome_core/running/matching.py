"""The plans of one block: matched from its input, or kept over steps."""

from __future__ import annotations

from functools import cache, partial
from typing import NamedTuple

import torch
from torch import nn

from ..attention.core import Whole, correction_of
from ..attention.correction import Pair
from ..compiling import compiles_here
from ..merging.grid import Draw
from ..merging.methods import METHODS, MatchOptions
from ..merging.methods.bipartite import refine_plan
from ..merging.metric import BY_DISTANCE, tokens_to_compare
from ..merging.plan import MergePlan
from ..settings.rule import MergeRule
from .call import GridCall
from .search import Plans, Search, stamp_of

# of queries, keys and values merged together in an attention whose inside is not known: more loses too much
_TOGETHER_RATIO, _TOGETHER_CELL = 0.5, 2


class Asked(NamedTuple):
    """What a part asks for: plans for ``x``, the input ``[B, N, C]`` of its block, by a rule.

    together: for q, k and v at once, whose sizes are not to count. whole: where what merging loses is to be corrected.
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
        kept, rule = asked.outer.call.kept, asked.rule
        if kept is None or not rule.keep or (torch.compiler.is_compiling() and compiles_here()):
            made = _make_pair(asked)
            return _correct(asked, self.groups(asked, made, None), made)
        device, renewing = asked.x.device, renews(asked.rule, asked.together)
        old = kept.find(self._key(asked, asked.outer.batch), rule, device, renewing)
        if old is not None and old.is_fresh:
            return old.kept.plans
        made_once = cache(partial(_make_pair, asked))
        return Search(
            rule, device, asked.outer.batch, renewing, partial(self._key, asked),
            lambda rows, old: self.groups(*_only(asked, made_once(), rows), old),
            lambda plans: _correct(asked, plans, made_once()),
        ).among(kept, old)  # fmt: skip

    def _key(self, asked: Asked, batch: int) -> tuple:
        return (self.number, asked.part, asked.together, batch, asked.outer.grid)

    def groups(self, asked: Asked, made: Pair | None, old: Plans | None) -> Plans:
        """A match without its correction. old: of an earlier time."""
        if asked.together and asked.rule.effective_side != "qkv":
            return Plans(self._match_as_tomesd(asked))
        renewed = renews(asked.rule, asked.together) and old is not None and old.plan is not None
        plan = self._renew(asked, made, old.plan) if renewed else self._match(asked, made)
        return Plans(plan)

    def _match(self, asked: Asked, made: Pair | None) -> MergePlan | None:
        rule, draw, refine = asked.rule, self._draw(asked), 0 if asked.together else asked.rule.refine
        by_distance = rule.metric in BY_DISTANCE
        options = MatchOptions(rule.constant_ratio, rule.sx, rule.sy, draw, refine, by_distance)
        return METHODS[rule.method].match(_tokens_to_compare(asked, made), asked.outer.grid, options)

    def _renew(self, asked: Asked, made: Pair | None, old: MergePlan) -> MergePlan:
        """One k-means step from the plan of an earlier time is as good as a new match with several, and cheaper."""
        return refine_plan(old, _tokens_to_compare(asked, made), 1, asked.rule.metric in BY_DISTANCE)

    def _match_as_tomesd(self, asked: Asked) -> MergePlan | None:
        """For a rule made for keys and values alone: tokens by cosine, no empty groups, and not too many merged."""
        rule, cell = asked.rule, _TOGETHER_CELL
        ratio = min(rule.constant_ratio, _TOGETHER_RATIO)
        options = MatchOptions(ratio, min(rule.sx, cell), min(rule.sy, cell), self._draw(asked))
        return METHODS["bipartite"].match(asked.x, asked.outer.grid, options)

    def _draw(self, asked: Asked) -> Draw | None:
        rule, stamp = asked.rule, asked.outer.call.stamp
        return Draw(rule.seed, self.level, stamp_of(stamp, asked.x)) if rule.use_rand else None


def renews(rule: MergeRule, together: bool = False) -> bool:
    """Is a plan that is too old where the rule's next match begins?"""
    return bool(rule.refine) and not together and METHODS[rule.method].compares


def _only(asked: Asked, made: Pair | None, rows: slice | None) -> tuple[Asked, Pair | None]:
    """What these samples ask for, and their keys and values; None: all of them."""
    if rows is None:
        return asked, made
    return asked._replace(x=asked.x[rows]), None if made is None else tuple(one[rows] for one in made)


def _correct(asked: Asked, plans: Plans, made: Pair | None) -> Plans:
    if made is None or plans.plan is None:
        return plans
    found = correction_of(asked.whole, made, plans.plan, asked.outer.grid)
    return plans._replace(correction=found.correction, merged=found.merged if found.by_kernels else None)


def _make_pair(asked: Asked) -> Pair | None:
    """Keys and values of all tokens, ``[B, N, H*d]``, where a correction needs them."""
    whole = asked.whole
    return None if whole is None else whole.known.keys_and_values(whole.module, whole.keys, whole.values, whole.kwargs)


def _tokens_to_compare(asked: Asked, made: Pair | None) -> torch.Tensor:
    """A method that does not compare by a metric gets the block's input."""
    rule = asked.rule
    return tokens_to_compare(asked.block, asked.x, rule.metric, made) if METHODS[rule.method].compares else asked.x
