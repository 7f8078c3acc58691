"""tomesd's way of merging: a part of a block is called with fewer tokens, and its output is spread again."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch

from ..merging.grid import Draw, Grid
from ..merging.methods import METHODS, MatchOptions
from ..merging.plan import MergePlan
from ..reporting.ledger import TOO_SMALL
from .call import Call
from .decision import Merging
from .plans import Plans

_REFUSED = "refuses merged tokens"
_NO_MEMORY = (MemoryError, torch.cuda.OutOfMemoryError)


def merge_around(
    call: Call, name: Hashable, grid: Grid, x: torch.Tensor, merging: Merging, draw: Draw | None,
    function: Callable[[Callable], torch.Tensor], plans: dict,
) -> tuple[torch.Tensor | None, MergePlan | None, str]:  # fmt: skip
    """Output, plan, and why the part was left alone. See `state.State.around`."""
    plan = _plan_of(call, name, grid, x, merging, draw, plans)
    if plan is None:
        return None, None, TOO_SMALL
    try:
        out = function(lambda one: plan.merge(one, merging.mode))
    except Exception as error:
        if isinstance(error, _NO_MEMORY):
            raise
        return None, plan, _REFUSED
    if not torch.is_tensor(out) or out.dim() != 3 or out.shape[:2] != (x.shape[0], plan.num_groups):
        return None, plan, "what it returned cannot be unmerged"
    return plan.unmerge(out), plan, ""


def _plan_of(
    call: Call, name: Hashable, grid: Grid, x: torch.Tensor, merging: Merging, draw: Draw | None, plans: dict[Any, Any]
) -> MergePlan | None:
    """One match of the block's input for all of its parts that merge by this rule; kept over steps if the rule says."""
    rule = merging.rule
    key = id(rule)
    if key not in plans:
        turn = call.turns[name, key] = call.turns.get((name, key), -1) + 1
        kept, where = call.kept, (name, "around", turn, x.shape[0], grid)
        old = kept.find(where, rule, x.device, renews=False) if kept is not None and rule.keep else None
        if old is not None:
            plans[key] = old.kept.plans.plan
        else:
            options = MatchOptions(rule.effective_ratio, rule.sx, rule.sy, draw)
            plans[key] = METHODS[rule.method].match(x, grid, options)
            if kept is not None and rule.keep:
                kept.store(where, Plans(plans[key]), rule, x.device)
    return plans[key]
