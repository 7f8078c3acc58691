"""Plans of a block inside a compiled graph, which asks for them while it runs: the question, and the answer."""

from __future__ import annotations

from dataclasses import replace
from operator import index
from types import SimpleNamespace

import torch

from ..attention.correction import Correction
from ..compiling import when_traced
from ..merging.grid import Grid
from ..merging.methods import METHODS
from ..merging.plan import MergePlan, of_pieces
from ..running.call import GridCall
from ..running.matching import Asked, Matcher
from ..running.search import Plans
from ..settings.rule import rule_of
from . import in_graph

_NO_CALL, _NO_BLOCK = SimpleNamespace(stamp=None), SimpleNamespace(attn1=None)


def may_ask(asked: Asked) -> bool:
    """Whether the graph that is being made asks, instead of matching by itself.

    Where a match may be kept. Not where a backward pass may follow, nor under autocast, which ends before an operator.
    """
    rule = asked.rule
    keeps = bool(rule.keep) and METHODS[rule.method].uses_ratio and not torch.is_grad_enabled()
    return bool(in_graph.OPERATORS.made) and keeps and not _autocasts(asked.x.device.type)


def ask(asked: Asked, site: torch.Tensor, stamp: torch.Tensor | None) -> Plans:
    """The plans, in a graph that is being made. site: who answers, by its number; stamp: as of `Call`."""
    rule, grid, x, whole = asked.rule, asked.outer.grid, asked.x, asked.whole
    counts = _count(rule.match_text, grid.height, grid.width, asked.together)
    if not counts:
        return Plans(None)
    groups = [int(one) for one in counts.split(",")]
    batch, tokens = index(x.shape[0]), index(x.shape[1])
    integers = [batch * tokens + (batch * (tokens + count) + 1 if x.is_cuda else 0) for count in groups]
    shape, dtype, tensors = [0], x.dtype, []
    if whole is not None:
        tensors = [one for one in (whole.x, whole.keys, whole.values, whole.q) if one is not None]
        q = whole.q
        if q is None:
            # of one token: its shape and type are all that is wanted, and a compiler leaves out what nobody uses
            q = whole.known.queries(whole.module, whole.x[:, :1], whole.kwargs)
        heads = whole.known.heads(whole.module)
        width = index(q.shape[2]) // heads
        shape, dtype = [batch * heads, 2 * width + 1, width], q.dtype
    begun = asked.outer.call.begun
    found = in_graph.OPERATORS.made["plans"](
        site if begun is None else begun, site, x, stamp, tensors,
        rule.match_text, asked.part, asked.together, grid.height, grid.width,
        integers, [batch * count for count in groups], shape, dtype,
    )  # fmt: skip
    plans = [_unpack(found[2 * i], found[2 * i + 1], batch, tokens, count) for i, count in enumerate(groups)]
    correction = None if whole is None else Correction(found[-1][:, :-1], found[-1][:, -1:])
    return Plans(plans[0], plans[1] if len(plans) > 1 else None, correction)


def answer(plans: Plans, batch: int) -> list[torch.Tensor]:
    """What `ask` takes apart again. No tensor of it is anybody else's: a compiler may write over them."""
    answers = [one.clone() for plan in plans[:2] if plan is not None for one in _pack(plan, batch)]
    correction = plans.correction
    answers.append(plans.plan.sizes.new_empty(0) if correction is None else torch.cat(correction, 1))
    return answers


def _pack(plan: MergePlan, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """All integers and all sizes; made once for a plan."""
    key = ("integers", batch)
    if key not in plan.derived:
        integers, sizes = plan.pieces(batch)
        plan.derived[key] = torch.cat([one.reshape(-1) for one in integers])
        plan.derived["sizes", batch] = sizes.reshape(-1)
    return plan.derived[key], plan.derived["sizes", batch]


def _unpack(integers: torch.Tensor, sizes: torch.Tensor, batch: int, tokens: int, groups: int) -> MergePlan:
    count = batch * tokens
    pieces = [integers[:count].view(batch, tokens)]
    if integers.shape[0] > count:
        pieces += [integers[count : 2 * count], integers[2 * count :]]
    return of_pieces(pieces, sizes.view(batch, groups))


@when_traced
def _count(match_text: str, height: int, width: int, together: bool) -> str:
    """How many groups there are, and of the queries' own plan, if there is one. "1024,2048"; "" where nothing merges.

    As a text, which stays a constant for every compiler. By a match of tokens without values.
    """
    rule = replace(rule_of(match_text), metric="input")  # whatever is compared, there are as many
    x, outer = torch.empty(1, height * width, 1, device="meta"), GridCall(_NO_CALL, 1, Grid(height, width), None)
    found = Matcher(0, 0).groups(Asked(_NO_BLOCK, x, outer, rule, "", together), None, None)
    return ",".join(str(plan.num_groups) for plan in found[:2] if plan is not None)


@when_traced
def _autocasts(kind: str) -> bool:
    return torch.is_autocast_enabled(kind)
