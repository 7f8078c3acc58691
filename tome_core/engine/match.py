"""Which tokens of a sequence merge: a match among the picture's keys and values, and a plan of the whole sequence.

The plan gives every other token a group of its own, so that what merges, sizes and corrects knows nothing of them. A
match looks at windows of the grid, one after the other, of some 4,096 tokens: its work grows with the tokens and not
with their square, and what it holds does not grow at all.
"""

from __future__ import annotations

import torch

from ..merging.grid import Draw
from ..merging.layout import Layout, cell_of, tokens_in, windows
from ..merging.methods import METHODS, MatchOptions
from ..merging.methods.bipartite import refine_plan
from ..merging.metric import BY_DISTANCE, of_unit_spread
from ..merging.plan import MergePlan
from ..settings.config import MergeRule


class JoinedPlan(MergePlan):
    """A plan of a whole sequence. counts: the groups of each window, which lie one after the other."""

    counts: tuple[int, ...] = ()

    def repeat(self, times: int) -> MergePlan:
        """As of every plan."""
        found = super().repeat(times)
        if found is not self:
            found = JoinedPlan(found.group, found.num_groups, found.representative)
            found.counts = self.counts
        return found


def match(
    k: torch.Tensor, v: torch.Tensor, layout: Layout, rule: MergeRule, draw: Draw | None = None,
    old: MergePlan | None = None,
) -> MergePlan | None:  # fmt: skip
    """Which of the sequence's tokens merge: groups of the picture's, each other token by itself.

    Args:
        k, v: ``[B, S, H, d]`` of all tokens, compared as the rule's metric says; keys, by cosine, if that is the input,
            which no attention sees.
        draw: what random destinations depend on.
        old: a plan of an earlier step, to take one k-means step from.

    Returns:
        None if the rule removes no token of some window.
    """
    by_distance, method, before, parts = rule.metric in BY_DISTANCE, METHODS[rule.method], layout.first, []
    counts = iter(() if old is None else getattr(old, "counts", (old.num_groups,)))
    for start, grid in windows(layout.grid):
        first, last = layout.first + start, layout.first + start + grid.height * grid.width
        x = _tokens_to_compare(k[:, first:last], v[:, first:last], rule)
        count = next(counts, None)
        if count is not None:
            # one k-means step from the plan of an earlier time is as good as a new match with several, and cheaper
            is_whole = last - first == k.shape[1]
            own = old if is_whole else MergePlan(old.group[:, first:last] - before, count)
            plan = refine_plan(own, x, 1, by_distance)
            before += count
        else:
            st, sy, sx = cell_of(rule.sy, rule.sx, grid.frames if method.compares else 1)
            options = (rule.effective_ratio, sx, sy, draw, rule.refine, by_distance, st)
            plan = method.match(x, grid, MatchOptions(*options))
        if plan is None:
            return None
        parts.append(plan)
    if len(parts) == 1 and k.shape[1] == tokens_in(layout):
        return parts[0]
    return _join(parts, layout, k.shape[1])


def _tokens_to_compare(k: torch.Tensor, v: torch.Tensor, rule: MergeRule) -> torch.Tensor:
    """A window's tokens as its match sees them, ``[B, n, D]``, without gradient."""
    k, v = k.detach().flatten(2), v.detach().flatten(2)
    if rule.metric == "keys+values":
        return of_unit_spread(k, v)
    return of_unit_spread(k) if rule.metric in BY_DISTANCE else k


def _join(parts: list[MergePlan], layout: Layout, tokens: int) -> JoinedPlan:
    """One plan of the sequence: tokens before the picture, the windows' groups, tokens behind it."""
    group, rows = parts[0].group, max(part.group.shape[0] for part in parts)
    numbers = torch.arange(tokens, device=group.device).expand(rows, -1)
    last = layout.first + tokens_in(layout)
    picked = all(part.representative is not None for part in parts)
    groups, chosen = [numbers[:, : layout.first]], [numbers[:, : layout.first]]
    before, start = layout.first, layout.first
    for part in parts:
        groups.append((part.group + before).expand(rows, -1))
        chosen += [(part.representative + start).expand(rows, -1)] if picked else []
        before, start = before + part.num_groups, start + part.num_tokens
    groups.append(numbers[:, last:] - last + before)
    chosen.append(numbers[:, last:])
    plan = JoinedPlan(torch.cat(groups, 1), before + tokens - last, torch.cat(chosen, 1) if picked else None)
    plan.counts = tuple(part.num_groups for part in parts)
    return plan
