"""The plans of an attention that are not at hand: matched, one match for all copies that guidance makes, and kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..attention.correction import Correction, Pair
from ..merging.plan import MergePlan
from ..settings.rule import MergeRule
from .keep import Found, Kept, KeptPlans, Shared


class Plans(NamedTuple):
    """What one match found: the plan, the queries' own where they have one, and what the plan's correction is.

    merged: keys and values ``[B, G, H*d]`` of the very call that matched, where its match has made them.
    """

    plan: MergePlan | None
    queries: MergePlan | None = None
    correction: Correction | None = None
    merged: Pair | None = None


@dataclass(frozen=True)
class Search:
    """How an attention finds its plans for a batch of so many samples.

    key: of what is kept for so many samples. renews: is a plan that is too old where the next match begins? match:
    ``(rows, old) -> Plans`` of these samples, of all of them for None, without a correction; old: of an earlier time.
    correct: the same plans with the correction of this call's batch.
    """

    rule: MergeRule
    device: torch.device
    batch: int
    renews: bool
    key: Callable[[int], tuple]
    match: Callable[[slice | None, Plans | None], Plans]
    correct: Callable[[Plans], Plans]

    def among(self, kept: KeptPlans, old: Found | None) -> Plans:
        """Make the matches of a call and keep them. old: what was kept for the whole batch, none of which is fresh."""
        shared, since = kept.look(), None
        if shared is not None and self.batch % shared.copies == 0:
            plans, since = self._share(kept, shared)
        else:
            plans = self.correct(self.match(None, old and old.kept.plans))
        kept.store(self.key(self.batch), plans._replace(merged=None), self.rule, self.device, since=since)
        return plans

    def _share(self, kept: KeptPlans, shared: Shared) -> tuple[Plans, Kept]:
        """The match of one copy of the latents serves all of them, in this call and in others at its time: guidance
        multiplies how differently merging has changed its two predictions.
        """
        count = self.batch // shared.copies
        key, rows = self.key(count), slice(shared.matched * count, (shared.matched + 1) * count)
        old = kept.find(key, self.rule, self.device, self.renews, shared)
        if old is not None and old.is_fresh:
            match = old.kept
        else:
            match = kept.store(key, self.match(rows, old and old.kept.plans), self.rule, self.device, shared)
        of_copies = (one and one.repeat(shared.copies) for one in match.plans[:2])  # of one picture they serve any
        return self.correct(Plans(*of_copies)), match


def stamp_of(time: object, x: torch.Tensor) -> torch.Tensor | None:
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
