"""Merge plans that are kept over the steps of one sampling, and never used in another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch

from ..attention.correction import Correction
from ..merging.plan import MergePlan
from ..settings.config import MergeRule


class Plans(NamedTuple):
    """The result of one match."""

    plan: MergePlan | None  # None if no token merges
    timestep: float | None  # of the step at which the match was made; None if the plan is not kept
    rule: MergeRule
    device: torch.device
    correction: Correction | None = None  # to add to outputs over merged keys; None if there is none (yet)


Guidance = tuple[int, int]  # (pictures, number of the copy that is matched), see `Sampling`


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

    def plans_for(
        self, key: tuple, rule: MergeRule, device: torch.device, match: Callable[[MergePlan | None], MergePlan | None]
    ) -> Plans:
        """Return the plans kept under a key, if they are at most `rule.keep` timesteps old; else match and keep plans.

        `key` tells which attention and shape the plans are for, and, by `ordinal` or the name in `shared`, which call.
        Kept plans of another device or rule, even if it is an equal copy of `rule`, are not used. `match` makes a plan.
        It gets the plan that is too old, or None if there is none; if it returns None, because no token merges, this is
        kept too. New plans have no correction.
        """
        plans = self.plans.get(key)
        if plans is not None and (plans.rule is not rule or plans.device != device):
            plans = None
        if plans is None or abs(plans.timestep - self.timestep) > rule.keep:
            plans = Plans(match(plans and plans.plan), self.timestep, rule, device)
            self.plans[key] = plans
        return plans


class Sampling:
    """One sampling of a picture or a batch, and the plans kept for its steps.

    A picture must not depend on the picture before. So plans are kept only within a sampling that has a name. They are
    kept by the call's shape and ordinal, because tiles of one size and the halves of a split batch look alike. Call
    `set` before each step, then `next_call` before each call of the model.

    Args:
        guidance_of: takes the latents of a call. Returns how many pictures the batch holds copies of (two copies of two
            pictures are a, b, a, b), and the number, from 0, of the copy that is matched; None without guidance. (At a
            guidance of 1.5, PSNR was 1 to 3 dB higher when the prompt's half was matched than when the negative
            prompt's was. At 7.5 they were equal.)
        boundary: the timestep at which the early phase ends; None: as the rules say.
        is_known: True if the sampling's steps are known; False: they are to be read from its first call.
    """

    def __init__(
        self, guidance_of: Callable[[torch.Tensor], Guidance | None] = lambda batch: None,
        boundary: float | None = None, is_known: bool = False,
    ) -> None:  # fmt: skip
        self.guidance_of, self.boundary, self.is_known = guidance_of, boundary, is_known
        self.name: Hashable = None  # without a name no plan is kept
        self._timestep: float | None = None
        self._calls: Counter[Hashable] = Counter()  # at this timestep, by name
        self._plans: dict[tuple, Plans] = {}
        self._first: tuple[Hashable, torch.Tensor] | None = None  # the first guided call at this timestep
        self._shared: dict[tuple, tuple[int, int, int, Hashable] | None] = {}  # by kind of call

    def set(self, name: Hashable, timestep: float | None) -> None:
        """Set the sampling's name and the timestep of the next calls. If either is None, they use and keep no plan.

        Another name, or None as the name, drops all kept plans; None as the timestep drops none. Another name or
        timestep restarts the count of calls (`ordinal`).
        """
        if name is None or name != self.name:
            self._plans.clear()  # a compiled model's last call still holds this dict
            self._plans, self._shared = {}, {}
        elif timestep == self._timestep:
            return
        self.name, self._timestep, self._first = name, timestep, None
        self._calls.clear()

    def next_call(self, batch: Any = None, called: Hashable = None) -> KeptPlans | None:
        """Count a call that begins now, and return the kept plans for it; None if no plan is used or kept.

        None is returned if the name or the timestep of the latest `set` is None. `batch` is the call's latents ``[B, C,
        ...]``. With guidance (see `_guidance_in`, which tells the number of pictures), plans are shared if it only
        repeats its own first pictures or those of the first guided call at this timestep; without, or with None, they
        are not. `called` is the host's name for the call; None stands for calls without a name. Calls of different
        names may come in any order.
        """
        if self.name is None or self._timestep is None:
            return None
        self._calls[called] += 1
        ordinal, shared = (called, self._calls[called]), None
        guidance = self._guidance_in(batch)
        if guidance is not None:
            self._first = self._first or (ordinal, batch)
            # Hosts cut pictures into tiles, and make more calls in a step than they announce. So the latents of each
            # kind of call are compared, once in a sampling, because the comparison waits for the device.
            kind = (ordinal, guidance, *batch.shape)
            if kind not in self._shared:
                self._shared[kind] = _share(batch, guidance, (self._first, (ordinal, batch)))
            shared = self._shared[kind]
        return KeptPlans(self._plans, ordinal, self._timestep, shared)

    def _guidance_in(self, batch: Any) -> Guidance | None:
        """Return `guidance_of`'s (pictures, matched copy); (1, 0) for a view that repeats a single latent by stride 0.

        None without guidance, or if `batch` is no plain tensor with values or has fewer than 2 dimensions.
        """
        if type(batch) is not torch.Tensor or batch.is_meta or batch.dim() < 2:
            return None
        return (1, 0) if len(batch) > 1 and batch.stride(0) == 0 else self.guidance_of(batch)  # one latent, expanded


def _share(
    batch: torch.Tensor, guidance: Guidance, calls: Sequence[tuple[Hashable, torch.Tensor]]
) -> tuple[int, int, int, Hashable] | None:
    """Return `KeptPlans.shared` if `batch` repeats the pictures of a call in `calls`, else None; waits for the device.

    A call is (ordinal, latents), and its first latents, as many as `guidance` has pictures, are its pictures. The
    result is (samples in `batch`, copies of the pictures in it, the matched copy's number, name), where the name holds
    the ordinal of the first of `calls` with the same pictures.
    """
    pictures, matched = guidance
    copies, rest = divmod(len(batch), pictures)
    for ordinal, latents in calls:
        first = latents[:pictures]
        comparable = (len(first), first.shape[1:], first.device) == (pictures, batch.shape[1:], batch.device)
        if rest == 0 and comparable and bool((batch.unflatten(0, (copies, pictures)) == first).all()):
            return len(batch), copies, min(matched, copies - 1), ("shared", ordinal)
    return None
