"""Fewer tokens into a part of a block, or into a whole block: `around` runs it on merged tokens, if a rule wants it.

A part (self-attention, cross-attention, feed-forward layer) merges by its block's input and gives back all tokens, as
tomesd does. A whole block hands its output over as `LazyTokens`, so blocks that follow each other stay merged. They are
a stretch, with one match.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..faults import may_be_of_fewer_tokens, quietly, text_of
from ..merging.grid import Grid, Layout, cached_result
from ..merging.methods import METHODS, MatchOptions
from ..merging.plan import MergePlan
from ..merging.pooling import pool
from ..reporting.ledger import COSTS, FEW_TOKENS, NO_GRID, TOO_SMALL, TOO_WRONG, Reason
from ..settings.config import MergeRule
from . import work
from .decision import ModelCall
from .match import draw_of, find_plans, match
from .merged_tokens import LazyTokens, MergedTokens, pick_samples
from .own_error import BLOCK

Merge = Callable[[Tensor], Tensor]  # merges a tensor of all tokens, ``(batch, tokens, channels)``
_NOT_TOKENS = "what it returned cannot be unmerged"


class Place(NamedTuple):
    """What runs on fewer tokens.

    Args:
        name: of the block, or of the block whose part it is; the same at every step and unique in the model.
        level: of its tokens, 0 for the finest.
        part: "attn", "crossattn", "mlp" or "block", as in `LevelRules`.
        stretch: names the blocks that may follow each other on merged tokens; "" for a part.
        weights: number of weights by which each token is multiplied in a part; 0 for a block, whose attention tells it.
        pools: whether the tokens of each cell merge, see `pool`, instead of those that are alike. The picture may then
            be a part of the block's sequence.
    """

    name: Hashable
    level: int
    part: str
    stretch: Hashable = ""
    weights: int = 0
    pools: bool = False


def around(
    call: ModelCall, place: Place, x: Any, layout: Layout | Reason | None, run: Callable[[Merge | None], Any],
    why_whole: Callable[[], str], keys: int = 0,
) -> Any:  # fmt: skip
    """Run a part or a block on merged tokens, unless it is too small for this or may need every token.

    What happened is counted, with the reason if it ran on all tokens.

    Args:
        call: the record of the model's call, in which a rule merges what runs.
        place: what runs.
        x: the block's input, ``(batch, tokens, channels)``.
        layout: the place of the picture's tokens in `x`; None if it is not known, or the reason.
        run: runs it. Its argument merges `x`, and any other tensor of all tokens, but not in a stretch with samples;
            None: it has to take all.
        why_whole: returns the reason why it may need every token, "" if it does not; asked last, because it is slow.
        keys: number of keys of an unmerged cross-attention, else 0.

    Returns:
        The output of `run` for all tokens; that of a merged block as `LazyTokens`. If it fails on merged tokens, by an
        error that these may have caused, it runs on all tokens, now and later, and the reason is counted.
    """
    state, stretch, why, cost = call.state, (call, place.stretch), call.state.refused.get(place, ""), 0
    tokens = x.tokens if type(x) is LazyTokens and x.stretch == stretch else None
    if tokens is not None:
        why = why or why_whole()
    elif not why:
        tokens, why, cost = _merge(call, place, x, layout, why_whole)
    if why:
        batch, count = x.shape[:2] if torch.is_tensor(x) and x.dim() == 3 else (0, 0)
        state.count_unmerged(place.level, why, batch, count, place.part)
        return run(None)
    batch, count = x.shape[:2]
    if isinstance(tokens, MergePlan):
        merge, left = tokens.merge, tokens.num_groups
    else:
        given = tokens.merged if type(x) is not LazyTokens or x.out is None else x.out
        # a copy: some hosts' blocks add to their input in place
        merge, left = lambda one: given.clone() if one is x else tokens.plan.merge(one), given.shape[1]
    before, call.inside, why = call.inside, (batch, count, left), _NOT_TOKENS
    try:
        out = run(merge)
    except Exception as error:
        if not may_be_of_fewer_tokens(error):
            raise
        out, why = None, f"it fails with merged tokens ({text_of(error)})"
    finally:
        call.inside = before
    # a block adds to its input, so its output has as many channels
    fits = place.part != "block" or (torch.is_tensor(out) and out.shape[2:] == x.shape[2:])
    if not torch.is_tensor(out) or out.dim() != 3 or out.shape[:2] != (batch, left) or not fits:
        out = run(None)  # first: if it fails with all tokens too, merging is not the cause
        state.refused[place] = why
        state.count_unmerged(place.level, why, batch, count, place.part)
        return out
    of_keys, left_of_keys = (count, left) if place.part == "attn" else (keys, keys)
    state.ledger.merge(place.level, place.part, (batch, count, of_keys), (left, left_of_keys), "", place.weights, cost)
    return tokens.unmerge(out) if isinstance(tokens, MergePlan) else LazyTokens(stretch, tokens, out)


def _merge(
    call: ModelCall, place: Place, x: Any, layout: Layout | Reason | None, why_whole: Callable[[], str]
) -> tuple[MergedTokens | MergePlan | None, str, int]:
    """Return the merged input of a block, or the plan of a part, "", and the work of it and of the way back.

    If it must not merge, these are None, the reason, and 0.
    """
    if not torch.is_tensor(x) or x.dim() != 3 or layout is None:
        return None, NO_GRID, 0
    if isinstance(layout, Reason):
        return None, layout, 0
    picture = layout.grid.height * layout.grid.width
    if layout.first + picture > x.shape[1] or (picture < x.shape[1] and not place.pools):
        return None, NO_GRID, 0
    if type(x) is LazyTokens:  # another stretch's
        x = x.whole()
    state, (name, level, part, *_), grid = call.state, place, layout.grid
    rules, not_now = state.decide(call, level, picture, x.device)
    rule = getattr(rules, part)
    if rule is None and (part, level) in call.too_wrong:
        return None, TOO_WRONG, 0
    if rule is None:
        return None, not_now or FEW_TOKENS, 0
    why = why_whole()
    if why:
        return None, why, 0
    is_block, cost = part == "block", 0
    if not is_block and not work.pays_in_part(rule, grid, x.shape[2], place.weights):
        return None, COSTS, 0
    known = {} if is_block else call.block.plans  # parts of a block share the matches of their rules
    if id(rule) not in known:
        known[id(rule)], cost = (
            (pool(layout, x.shape[1], rule.sy, rule.sx, rule.effective_ratio, x.device), 0) if place.pools
            else _plan_of(call, name, level, x, grid, rule, is_block)
        )
    plan, is_new = known[id(rule)], cost > 0
    if plan is None:
        return None, TOO_SMALL, 0
    state.note_map(level, layout, plan)
    if not is_block:
        return plan, "", cost
    samples = cached_result(pick_samples, x, grid)[0] if rule.correction and not place.pools else None
    cost += x.shape[0] * work.of_way_back(x.shape[1], 0 if samples is None else len(samples), x.shape[2])
    share = plan.num_groups / x.shape[1]
    note = partial(quietly, state.note_error, call, BLOCK, level, share) if is_new else None
    # a copy: compiled code may use the memory of what it returned before again, as CUDA graphs do
    return MergedTokens.of(x.clone(), plan, samples, note), "", cost


def _plan_of(
    call: ModelCall, name: Hashable, level: int, x: Tensor, grid: Grid, rule: MergeRule, is_block: bool
) -> tuple[MergePlan | None, int]:
    """Return a kept plan, if young enough, or a new match of a block's input `x`, and the work of matching.

    The plan is None if no token merges.
    """
    cost = 0

    def match_rows(rows: slice, old: MergePlan | None) -> MergePlan | None:
        nonlocal cost
        draw = draw_of(call, level, rule, x.device)
        if is_block:
            compared = F.layer_norm(x.detach()[rows], x.shape[2:])[:, :, None]
            plan = match(compared, compared, Layout(grid), rule, draw, old)
        else:  # a part's tokens merge as tomesd merges them: compared as they are, in one window
            options = MatchOptions(rule.effective_ratio, rule.sx, rule.sy, draw)
            plan = METHODS[rule.method].match(x.detach().contiguous()[rows], grid, options)
        if plan is not None:
            features = x.shape[2] * (2 if is_block and rule.metric == "keys+values" else 1)
            of_sample = work.of_match(rule, grid, plan.num_groups, features, old is not None, not is_block)
            cost += x[rows].shape[0] * of_sample
        return plan

    of_rule = name, id(rule)  # parts of one block may have different rules
    turn = call.latest_runs[of_rule] = call.latest_runs.get(of_rule, -1) + 1
    key = (of_rule, turn), x.shape[0], Layout(grid), x.shape[1]
    return find_plans(call, key, rule, x.device, match_rows).plan, cost
