"""Matching: which of the picture's tokens merge, as a plan of the whole sequence, new or kept.

Matches are made in windows of the grid, each of some 4,096 tokens, so the work grows with the number of tokens and not
with the square. Equal windows are matched together, as samples of one batch.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from operator import itemgetter

import torch

from ..merging.grid import Draw, Layout, cached_result, cell_of, tokens_in, windows
from ..merging.methods import METHODS, MatchOptions
from ..merging.methods.bipartite import refine_plan
from ..merging.metric import of_unit_spread
from ..merging.plan import MergePlan
from ..settings.config import MergeRule
from .decision import ModelCall
from .plan_cache import Plans


def match(
    k: torch.Tensor, v: torch.Tensor, layout: Layout, rule: MergeRule, draw: Draw | None = None,
    old: MergePlan | None = None,
) -> MergePlan | None:  # fmt: skip
    """Choose which of the picture's tokens merge: return a plan of the sequence, or None if a window loses no token.

    `rule` gives method, ratio and cells, `layout` the picture's place. Each token outside it is a group by itself. Keys
    `k` and values `v` are ``[B, S, H, d]``, of the whole sequence. The rule's metric "keys+values" compares both, by
    distance; "input" compares `k` alone, by cosine. `draw`, with at most one timestep, chooses each cell's destination;
    None: the first token. One k-means step adapts `old`, a plan of the same layout from an earlier step; None: a new
    match is made. No gradient flows through the choice.
    """
    by_distance, method, before = rule.metric == "keys+values", METHODS[rule.method], layout.first
    tokens, parts, counts = k.shape[1], [], []
    known = iter(() if old is None else old.groups_per_window or (old.num_groups,))
    for grid, run in groupby(windows(layout.grid), itemgetter(1)):
        starts = [start for start, _ in run]
        times, size = len(starts), grid.height * grid.width
        places = slice(layout.first + starts[0], layout.first + starts[0] + times * size)
        x = _apart(k[:, places], times)
        if by_distance:
            x = of_unit_spread(x, _apart(v[:, places], times))
        groups = next(known, None)
        if groups is not None:
            # one k-means step from an earlier plan is as good as a new match with several steps, and cheaper
            earlier = old if size == tokens else _part(old, places, before, times, groups, x)
            plan = refine_plan(earlier, x, 1, by_distance)
        else:
            st, sy, sx = cell_of(rule.sy, rule.sx, grid.frames if method.compares else 1)
            options = MatchOptions(rule.effective_ratio, sx, sy, draw, rule.refine, by_distance, st)
            plan = method.match(x, grid, options)
        if plan is None:
            return None
        counts.append(plan.num_groups)
        parts.append(_in_sequence(plan, before, times))
        before += times * plan.num_groups
    if len(parts) == 1 and tokens == tokens_in(layout):
        return plan if times == 1 else MergePlan(parts[0], before, tuple(counts))
    return _join(parts, layout, tokens, before, tuple(counts))


def find_plans(
    call: ModelCall, key: tuple, rule: MergeRule, device: torch.device,
    match_rows: Callable[[slice, MergePlan | None], MergePlan | None],
) -> Plans:  # fmt: skip
    """Return plans for the whole batch, without a correction, kept or new.

    If the batch is known to hold copies of latents, all share the match of one copy, also in other calls at this
    timestep: guidance multiplies the difference of its two predictions, so they must not be changed differently. `key`
    is ((name, number of the run in this call), batch, and whatever else a plan depends on). `match_rows` makes a plan
    for a slice of the batch; it also gets the older plan to adapt, or None.
    """
    name, batch, *where = key
    kept = call.kept_plans if rule.keep else None
    copies, matched, place = 1, 0, ("alone", kept and kept.ordinal)
    if kept is not None and kept.shared is not None and batch % kept.shared[0] == 0:  # not for a part of the batch
        copies, matched, place = kept.shared[1:]
    count, renews = batch // copies, rule.refine and METHODS[rule.method].compares
    rows = slice(matched * count, (matched + 1) * count)
    if kept is None:
        plans = Plans(match_rows(rows, None), None, rule, device)
    else:
        plans = kept.plans_for((place, name, count, *where), rule, device,
                               lambda old: match_rows(rows, old if renews else None))  # fmt: skip
    return plans._replace(plan=plans.plan and plans.plan.repeat(copies))


def draw_of(call: ModelCall, level: int, rule: MergeRule, device: torch.device) -> Draw | None:
    """Return a match's random draw, by the first sample's timestep, if any; None without `rule.use_rand`.

    All matches of a level in one call share it, and so the destinations.
    """
    if not rule.use_rand:
        return None
    key, time = (rule.seed, level, device), call.timestep
    if key in call.draws:
        return call.draws[key]
    if torch.is_tensor(time):
        time = time.detach().reshape(-1)[:1]
    elif time is not None:
        time = torch.full((1,), float(time), dtype=torch.float32, device=device)
    return call.draws.setdefault(key, Draw(rule.seed, level, time, {}))


def _apart(x: torch.Tensor, times: int) -> torch.Tensor:
    """Reshape ``[B, times*n, H, d]`` to ``[B*times, n, H*d]``, so that each window is a sample; without gradient."""
    return x.detach().flatten(2).unflatten(1, (times, -1)).flatten(0, 1)


def _part(old: MergePlan, places: slice, before: int, times: int, groups: int, x: torch.Tensor) -> MergePlan:
    """Return an old plan's part for `times` equal windows at `places`, each a sample of `x`, ``[B*times, n]``.

    Each window has `groups` groups; `before` is the first window's first group in `old`.
    """
    (offsets,) = cached_result(_offsets, x, before, times, groups)
    group = old.group[:, places].unflatten(1, (times, -1)) - offsets
    return MergePlan(group.expand(len(x) // times, -1, -1).flatten(0, 1), groups)


def _in_sequence(plan: MergePlan, before: int, times: int) -> torch.Tensor:
    """Return the groups of tokens, ``[B or 1, times*n]``, by a plan of windows, ``[B*times or 1, n]``.

    A single row serves all windows; `before` is the number of the first window's first group.
    """
    if times == 1 and before == 0:
        return plan.group
    (offsets,) = cached_result(_offsets, plan.group, before, times, plan.num_groups)
    group = plan.group.expand(times, -1) if len(plan.group) == 1 else plan.group
    return (group.unflatten(0, (-1, times)) + offsets).flatten(1)


def _offsets(before: int, times: int, step: int, device: torch.device) -> tuple[torch.Tensor]:
    """Return the first group of each of `times` windows with `step` groups each, from `before`, int64 ``[times, 1]``.

    It is in a tuple for `cached_result`.
    """
    return (torch.arange(before, before + times * step, step, device=device)[:, None],)


def _join(
    parts: list[torch.Tensor], layout: Layout, tokens: int, groups: int, counts: tuple[int, ...]
) -> MergePlan:  # fmt: skip
    """Join the groups of runs of windows, in order, into a plan of all `tokens`; each token around the picture is one.

    `groups` is the number of the first group after the picture's, `counts` is the result's `groups_per_window`.
    """
    first, last, rows = layout.first, layout.first + tokens_in(layout), max(map(len, parts))
    numbers = torch.arange(tokens, device=parts[0].device).expand(rows, -1)
    after = numbers[:, last:] - last + groups
    joined = torch.cat([numbers[:, :first], *(part.expand(rows, -1) for part in parts), after], 1)
    return MergePlan(joined, groups + tokens - last, counts)
