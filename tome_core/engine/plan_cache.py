"""Plans that serve several steps of one sampling, and never a step of another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch

from ..attention.correction import Correction
from ..merging.plan import MergePlan
from ..settings.config import MergeRule


class Plans(NamedTuple):
    """What one match found, at which timestep, by which rule, on which device. plan: None if the grid is too small."""

    plan: MergePlan | None
    timestep: float | None
    rule: MergeRule
    device: torch.device
    correction: Correction | None = None


Guidance = tuple[int, int]  # see `Sampling`


class KeptPlans(NamedTuple):
    """What one call of a model finds of earlier ones, and leaves for later ones.

    plans: by ordinal and key. ordinal: what its host calls it by, and its number among the calls of that name at its
    time, several if a host splits a batch or a picture. shared: samples in its batch, copies of the latents in it,
    which of them is matched, and the name of the calls that see these latents; None if its latents are no copies.
    """

    plans: dict[tuple, Plans]
    ordinal: Hashable
    timestep: float
    shared: tuple[int, int, int, Hashable] | None

    def serve(
        self, key: tuple, rule: MergeRule, device: torch.device, match: Callable[[MergePlan | None], MergePlan | None]
    ) -> Plans:
        """What was kept under this key, if it is young enough; else a new match, which is kept.

        match: makes it; its argument is the plan of this rule that is too old, or None.
        """
        found = self.plans.get(key)
        if found is not None and (found.rule is not rule or found.device != device):
            found = None
        if found is None or abs(found.timestep - self.timestep) > rule.keep:
            found = Plans(match(found and found.plan), self.timestep, rule, device)
            self.plans[key] = found
        return found


class Sampling:
    """Which sampling is going on, at which time.

    A picture must not depend on the one before. So plans are kept within a sampling that somebody has named, by the
    call's shape and ordinal: tiles of one size, and the halves of a split batch, look alike otherwise.

    Args:
        guidance_of: the guidance of its calls, from their latents: how many pictures a batch has copies of, in their
            order, and which copy a match is made from; None if nobody guides. (From the prompt's PSNR was 1 to 3 dB
            higher at a guidance of 1.5 than from the negative one's, and equal at 7.5.)
        boundary: of the early phase in it, see `time.Clock.boundary_in`.
        is_known: nothing is to be learned of its steps.
    """

    def __init__(
        self, guidance_of: Callable[[torch.Tensor], Guidance | None] = lambda batch: None,
        boundary: float | None = None, is_known: bool = False,
    ) -> None:  # fmt: skip
        self.guidance_of, self.boundary, self.is_known = guidance_of, boundary, is_known
        self.name: Hashable = None  # if there is none, nothing is kept
        self._timestep: float | None = None
        self._calls: Counter[Hashable] = Counter()  # at this time, by name
        self._plans: dict[tuple, Plans] = {}
        self._first: tuple[Hashable, torch.Tensor] | None = None  # the first guided call at this time
        self._shared: dict[tuple, tuple[int, int, int, Hashable] | None] = {}  # by kind of call

    def set(self, name: Hashable, timestep: float | None) -> None:
        """The next calls belong to the sampling of this name, at this time. No name, or no time: nothing is kept."""
        if name is None or name != self.name:
            self._plans.clear()  # which a compiled model's last call still holds
            self._plans, self._shared = {}, {}
        elif timestep == self._timestep:
            return
        self.name, self._timestep, self._first = name, timestep, None
        self._calls.clear()

    def next_call(self, batch: Any = None, called: Hashable = None) -> KeptPlans | None:
        """What the call that begins now may use; None if nothing is kept.

        batch: its latents ``[B, C, ...]``. called: what its host calls it by, in whatever order calls come.
        """
        if self.name is None or self._timestep is None:
            return None
        self._calls[called] += 1
        ordinal, shared = (called, self._calls[called]), None
        guidance = self._guidance_in(batch)
        if guidance is not None:
            self._first = self._first or (ordinal, batch)
            # Hosts cut pictures into tiles, and put more into a step than they say. So each kind of call is looked at,
            # once in a sampling, because a look waits for the device.
            kind = (ordinal, guidance, *batch.shape)
            if kind not in self._shared:
                self._shared[kind] = _share(batch, guidance, (self._first, (ordinal, batch)))
            shared = self._shared[kind]
        return KeptPlans(self._plans, ordinal, self._timestep, shared)

    def _guidance_in(self, batch: Any) -> Guidance | None:
        if type(batch) is not torch.Tensor or batch.is_meta or batch.dim() < 2:
            return None
        return (1, 0) if len(batch) > 1 and batch.stride(0) == 0 else self.guidance_of(batch)  # one latent, expanded


def _share(
    batch: torch.Tensor, guidance: Guidance, calls: Sequence[tuple[Hashable, torch.Tensor]]
) -> tuple[int, int, int, Hashable] | None:
    """`KeptPlans.shared` of a call: with the first of these calls of whose latents its batch is made."""
    pictures, matched = guidance
    copies, rest = divmod(len(batch), pictures)
    for ordinal, latents in calls:
        one = latents[:pictures]
        comparable = (len(one), one.shape[1:], one.device) == (pictures, batch.shape[1:], batch.device)
        if rest == 0 and comparable and bool((batch.unflatten(0, (copies, pictures)) == one).all()):
            return len(batch), copies, min(matched, copies - 1), ("shared", ordinal)
    return None
