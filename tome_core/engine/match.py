"""Which tokens of a sequence merge: a match among the picture's keys and values, and a plan of the whole sequence.

The plan gives every other token a group of its own, so that what merges, sizes and corrects knows nothing of them. A
match looks at windows of the grid, of some 4,096 tokens: its work grows with the tokens and not with their square.
Equal windows are matched together, as samples of one batch.
"""

from __future__ import annotations

from itertools import groupby
from operator import itemgetter

import torch

from ..merging.grid import Draw, Layout, cell_of, tokens_in, windows
from ..merging.methods import METHODS, MatchOptions
from ..merging.methods.bipartite import refine_plan
from ..merging.metric import of_unit_spread
from ..merging.plan import MergePlan
from ..settings.config import MergeRule


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
    by_distance, method, before = rule.metric == "keys+values", METHODS[rule.method], layout.first
    tokens, parts, counts = k.shape[1], [], []
    known = iter(() if old is None else old.counts or (old.num_groups,))
    for grid, run in groupby(windows(layout.grid), itemgetter(1)):
        starts = [start for start, _ in run]
        times, size = len(starts), grid.height * grid.width
        places = slice(layout.first + starts[0], layout.first + starts[0] + times * size)
        x = _apart(k[:, places], times)
        if by_distance:
            x = of_unit_spread(x, _apart(v[:, places], times))
        groups = next(known, None)
        if groups is not None:
            # one k-means step from the plan of an earlier time is as good as a new match with several, and cheaper
            own = old if size == tokens else _part(old, places, before, times, groups, x)
            plan = refine_plan(own, x, 1, by_distance)
            before += times * groups
        else:
            st, sy, sx = cell_of(rule.sy, rule.sx, grid.frames if method.compares else 1)
            options = (rule.effective_ratio, sx, sy, _for_each(draw, times), rule.refine, by_distance, st)
            plan = method.match(x, grid, MatchOptions(*options))
        if plan is None:
            return None
        counts.append(plan.num_groups)
        parts.append(plan if times == 1 else _side_by_side(plan, times))
    if len(parts) == 1 and tokens == tokens_in(layout) and times == 1:
        return plan
    return _join(parts, layout, tokens, tuple(counts))


def _apart(x: torch.Tensor, times: int) -> torch.Tensor:
    """``[B, times*n, H, d]`` to ``[B*times, n, H*d]``: each window is a sample. Without gradient."""
    return x.detach().flatten(2).unflatten(1, (times, -1)).flatten(0, 1)


def _for_each(draw: Draw | None, times: int) -> Draw | None:
    """The draw of windows that are samples: each window draws as its sample would."""
    if draw is None or draw.time is None or draw.time.shape[0] == 1:
        return draw
    return draw._replace(time=draw.time.repeat_interleave(times))


def _part(old: MergePlan, places: slice, before: int, times: int, groups: int, x: torch.Tensor) -> MergePlan:
    """The plan of these windows alone: of as many samples as they are in ``x``."""
    group = (old.group[:, places] - before).unflatten(1, (times, -1))
    group = group - _offsets(times, groups, group.device)
    return MergePlan(group.expand(len(x) // times, -1, -1).flatten(0, 1), groups)


def _side_by_side(plan: MergePlan, times: int) -> MergePlan:
    """One plan of windows that are samples of another."""
    group = plan.group.expand(times, -1) if len(plan.group) == 1 else plan.group
    group = group.unflatten(0, (-1, times)) + _offsets(times, plan.num_groups, group.device)
    return MergePlan(group.flatten(1), times * plan.num_groups)


def _offsets(times: int, step: int, device: torch.device) -> torch.Tensor:
    return torch.arange(0, times * step, step, device=device)[:, None]


def _join(parts: list[MergePlan], layout: Layout, tokens: int, counts: tuple[int, ...]) -> MergePlan:
    """One plan of the sequence: tokens before the picture, the windows' groups, tokens behind it."""
    first, rows = layout.first, max(len(part.group) for part in parts)
    last, before = first + tokens_in(layout), first
    numbers = torch.arange(tokens, device=parts[0].group.device).expand(rows, -1)
    groups = [numbers[:, :first]]
    for part in parts:
        groups.append((part.group + before).expand(rows, -1))
        before += part.num_groups
    groups.append(numbers[:, last:] - last + before)
    return MergePlan(torch.cat(groups, 1), before + tokens - last, counts)
