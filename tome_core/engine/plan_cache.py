"""Merge plans that are kept over the steps of one sampling, and never used in another."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import NamedTuple

import torch

from ..attention.correction import Correction
from ..merging.plan import MergePlan
from ..reporting.ledger import TOO_SMALL
from ..settings.config import MergeRule
from .own_error import OwnError


class Plans(NamedTuple):
    """The result of one match."""

    plan: MergePlan | None  # None if no token merges
    timestep: float | None  # of the step at which the match was made; None if the plan is not kept
    rule: MergeRule
    device: torch.device
    correction: Correction | None = None  # to add to outputs over merged keys; None if there is none (yet)
    work: int = 0  # of adding the correction, once for the batch
    why: str = TOO_SMALL  # the reason why no token merges, if none does


class KeptPlans(NamedTuple):
    """The kept plans that one call of a model may use, and to which it adds."""

    plans: dict[tuple, Plans]  # of the sampling; `plans_for` adds to them in place
    # the host's name for the call, and the call's number, from 1, among those of this name at its timestep: a host may
    # split a batch or a picture
    ordinal: Hashable
    timestep: float
    # how many samples the batch has, how many copies of the latents these are, which copy (from 0) is matched, and a
    # name shared by all calls with these latents; None if the batch is not made of copies
    shared: tuple[int, int, int, Hashable] | None
    own_error: OwnError  # of the sampling
    step: int = 1  # the number of the sampling's step, from 1

    def plans_for(
        self, key: tuple, rule: MergeRule, device: torch.device, match: Callable[[MergePlan | None], MergePlan | None]
    ) -> Plans:
        """Return the plans kept under a key, if they are at most `rule.keep` timesteps old; else match and keep plans.

        `key` tells which attention and shape the plans are for, and, by `ordinal` or the name in `shared`, which call.
        Kept plans of another device or rule, even an equal one, are not used. `match` makes a plan from the one that is
        too old, or None; it may return None, because no token merges: this is kept too.
        """
        plans = self.plans.get(key)
        if plans is not None and (plans.rule is not rule or plans.device != device):
            plans = None
        if plans is None or abs(plans.timestep - self.timestep) > rule.keep:
            plans = Plans(match(plans and plans.plan), self.timestep, rule, device)
            self.plans[key] = plans
        return plans
