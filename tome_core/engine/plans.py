"""The plans of an attention: what is kept of earlier steps, else a new match, one for all copies of guidance."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..attention.correction import Correction, Pair
from ..merging.plan import MergePlan
from ..settings.config import MergeRule
from .plan_cache import Found, Kept, KeptPlans, Shared


class Plans(NamedTuple):
    """What one match found. plan: None if the grid is too small.

    merged: keys and values ``[B, G, H*d]`` of the very call that matched, if its match has made them.
    """

    plan: MergePlan | None
    correction: Correction | None = None
    merged: Pair | None = None


class Request(NamedTuple):
    """Which plans an attention asks for.

    key: what names them for a batch of so many samples. renews: a plan that is too old is where the next match begins.
    match: ``(rows, old) -> Plans`` of these samples, all for None, without a correction; old: of an earlier time, or
    None. correct: the same plans with the correction of this call's batch.
    """

    rule: MergeRule
    device: torch.device
    batch: int
    renews: bool
    key: Callable[[int], tuple]
    match: Callable[[slice | None, Plans | None], Plans]
    correct: Callable[[Plans], Plans]


def match_or_reuse(kept: KeptPlans | None, request: Request, old: Found | None) -> Plans:
    """Match, and keep the plans. old: what was kept for the whole batch, none of which is fresh."""
    if kept is None or not request.rule.keep:
        return request.correct(request.match(None, None))
    shared, since = kept.look(), None
    if shared is not None and request.batch % shared.samples == 0:  # not of a piece of the batch
        plans, since = _share(kept, request, shared)
    else:
        plans = request.correct(request.match(None, old and old.kept.plans))
    key = request.key(request.batch)
    kept.store(key, plans._replace(merged=None), request.rule, request.device, since=since)
    return plans


def _share(kept: KeptPlans, request: Request, shared: Shared) -> tuple[Plans, Kept]:
    """The match of one copy of the latents serves all of them, in this call and in others at its time: guidance
    multiplies how differently merging has changed its two predictions.
    """
    rule, device = request.rule, request.device
    count = request.batch // shared.copies
    key, rows = request.key(count), slice(shared.matched * count, (shared.matched + 1) * count)
    old = kept.find(key, rule, device, request.renews, shared)
    if old is not None and old.is_fresh:
        match = old.kept
    else:
        match = kept.store(key, request.match(rows, old and old.kept.plans), rule, device, shared)
    plan = match.plans.plan
    return request.correct(Plans(plan and plan.repeat(shared.copies))), match


def stamp_of(time: Any, x: torch.Tensor) -> torch.Tensor | None:
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
