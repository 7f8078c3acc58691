"""The record of one model call, and the decision which rules merge in it."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ..merging.grid import Draw, Grid, Layout
from ..merging.plan import MergePlan
from ..reporting.ledger import FEW_TOKENS, OTHER_PARTS, TOO_WRONG
from ..settings.rules import LevelRules
from .plan_cache import KeptPlans

# The fewest tokens at which a merged block is faster than an unmerged one, at any preset. cpu: measured with an SD1.5
# block in float32, batch 2, one thread: .84 to 1.06 of the unmerged speed at 576 tokens if every step matches again,
# 1.22 to 1.32 at 1,024 tokens over the steps of a picture. Elsewhere: estimated from the number of kernel launches.
_LEAST = {"cpu": 1024}
_LEAST_ELSEWHERE = 3600
# For whole blocks, most of whose work grows with the number of tokens alone, on any device. Estimated: SDXL at 1024 px,
# with 1,024 tokens of 1,280 channels, is 1.2 to 1.5 times as fast (docs/benchmarks.md, "Whole blocks"). Its pictures of
# about a megapixel, such as 832x1216 or 704x1344, have 924 tokens or more.
_LEAST_FOR_BLOCKS = 900


class BlockInput(NamedTuple):
    """The input of a block, by which its parts merge."""

    x: torch.Tensor  # (batch, tokens, channels)
    grid: Grid
    plans: dict[int, MergePlan | None]  # of this run of the block, by the id of a rule


@dataclass(eq=False)
class ModelCall:
    """The record of one call of a model. The adapters alone use the fields from `facts` on."""

    state: Any  # the `State` that began the call
    timestep: Any  # the model's argument, a number or a tensor, on which random draws depend
    rules: tuple[LevelRules, ...]  # in force, one for each level, the finest first; all None if no rule is
    why_off: tuple[str, ...]  # the reason why no rule is in force, by level; read only if none is
    gate: str | None  # for `decide`
    kept_plans: KeptPlans | None = None  # of earlier calls in the same sampling; None: none is used or kept
    # parts, "attn" or "block", and levels that keep all tokens because merging would change the model too much
    too_wrong: frozenset[tuple[str, int]] = frozenset()
    # whether gradients were enabled when the call began; reentrant checkpoints run blocks with gradients disabled
    has_gradients: bool = field(default_factory=torch.is_grad_enabled)
    draws: dict[Hashable, Draw] = field(default_factory=dict)  # those of `match.draw_of`
    latest_runs: dict[Hashable, int] = field(default_factory=dict)  # number, from 0, of an attention's latest run
    facts: Any = None  # what else the adapter has read from the call's arguments
    # by tensor of positions, its place and the picture's: (the tensor, so that it stays, merged positions)
    positions: dict[tuple, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    layouts: dict[int, Layout] = field(default_factory=dict)  # by level of a UNet, the latest place of the picture
    # of the block that runs, or why it is not known; None outside of blocks whose parts may merge as tomesd merges them
    block: BlockInput | str | None = None
    # (batch, tokens, merged tokens) of what runs on merged tokens just now; None: all that runs has all tokens
    inside: tuple[int, int, int] | None = None
    called_attentions: list[str] = field(default_factory=list)  # the module paths of those that were called or counted

    def why_not(self, part: str, level: int) -> str:
        """Return the reason why no rule merges a part of a level now; read only if none does."""
        if (part, level) in self.too_wrong:
            return TOO_WRONG
        return OTHER_PARTS if any(self.rules[level]) else self.why_off[level]


class MergeMap(NamedTuple):
    """The groups of one attention's tokens, for display."""

    grid: Grid
    group: torch.Tensor  # int64 [B or 1, N], the group of each token; on the CPU in the result of `State.maps`
    num_groups: int  # of the whole sequence; these tokens may be in some of them only


def decide(
    rules: LevelRules, why_off: str, tokens: int, device: str, gate: str | None = None
) -> tuple[LevelRules, str]:
    """Return the rules that merge in a level (None for a part that does not), and the reason if none does, else "".

    `rules` are those in force, by part, and `why_off` is the reason if all are None. A rule with `only_if_it_pays` does
    not merge if `gate` is a reason, or if the level has fewer `tokens` of the picture than pay on this type of
    `device`.
    """
    if not any(rules):
        return rules, why_off
    least = _LEAST.get(device, _LEAST_ELSEWHERE)
    pays = [gate is None and tokens >= fewest for fewest in (least, least, least, _LEAST_FOR_BLOCKS)]
    merging = LevelRules(*(rule if rule and (part_pays or not rule.only_if_it_pays) else None
                           for rule, part_pays in zip(rules, pays, strict=True)))  # fmt: skip
    return merging, "" if any(merging) else gate or FEW_TOKENS
