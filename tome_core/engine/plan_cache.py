"""Plans that serve several steps of one sampling, and never a step of another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, NamedTuple

import torch


class Guidance(NamedTuple):
    """What somebody says of a call: its batch is made of copies of the latents of so many pictures, in their order.

    As guidance wants them, for a prompt and a negative one. matched: which of the copies a match is made from. (From
    the prompt's PSNR was 1 to 3 dB higher at a guidance of 1.5 than from the negative one's, and equal at 7.5.)
    """

    pictures: int
    matched: int = 0


class Shared(NamedTuple):
    """What calls have in common that see the same latents at the same time.

    samples: in this call's batch; copies: of the latents, in it; matched: which of them a match is made from; call: the
    ordinal of the first that saw them.
    """

    samples: int
    copies: int
    matched: int
    call: Hashable


class Kept:
    """An attention's plans, the timestep they were made at, the rule they were made for, and their device."""

    def __init__(self, plans: Any, timestep: float, rule: Any, device: torch.device) -> None:
        self.plans, self.timestep, self.rule, self.device = plans, timestep, rule, device


class Found(NamedTuple):
    """What an earlier call has left, and whether it is young enough to be used as it is."""

    kept: Kept
    is_fresh: bool


class KeptPlans:
    """What one call of the UNet finds of earlier ones, and leaves for later ones.

    plans: by ordinal and key. ordinal: the call's number among those at its time, several if a host splits a batch or
    a picture; or its name. look: what it has in common with other calls; gives None if that is nothing.
    """

    def __init__(
        self, plans: dict[tuple, Kept], ordinal: Hashable, timestep: float, look: Callable[[], Shared | None]
    ) -> None:
        self.plans, self.look = plans, look
        self.ordinal, self.timestep = ordinal, timestep

    def find(
        self, key: tuple, rule: Any, device: torch.device, renews: bool, shared: Shared | None = None
    ) -> Found | None:
        """What was kept by this rule, on this device. renews: use is made of what is too old; shared: by all copies."""
        old = self.plans.get(self._whole(key, shared))
        if old is None or old.rule is not rule or old.device != device:
            return None
        is_fresh = abs(old.timestep - self.timestep) <= rule.keep
        return Found(old, is_fresh) if is_fresh or renews else None

    def store(
        self, key: tuple, plans: Any, rule: Any, device: torch.device, shared: Shared | None = None,
        since: Kept | None = None,
    ) -> Kept:  # fmt: skip
        """Keep plans that were made now, or as long ago as these others."""
        timestep = self.timestep if since is None else since.timestep
        found = self.plans[self._whole(key, shared)] = Kept(plans, timestep, rule, device)
        return found

    def _whole(self, key: tuple, shared: Shared | None) -> tuple:
        return (self.ordinal if shared is None else ("shared", shared.call), *key)


class Sampling:
    """Which sampling is going on, at which time.

    A picture must not depend on the one before. So plans are kept within a sampling that somebody has named, by the
    call's shape and ordinal: tiles of one size, and the halves of a split batch, look alike otherwise.
    """

    def __init__(self) -> None:
        self._name: Hashable = None
        self._timestep: float | None = None
        self._calls = 0
        self._named: Counter[Hashable] = Counter()  # calls of each name at this time
        self._plans: dict[tuple, Kept] = {}
        self._first: torch.Tensor | None = None  # what the first call at this time is given
        self._shared: dict[tuple, Shared | None] = {}  # by kind of call

    def set(self, name: Hashable, timestep: float | None) -> None:
        """The next calls belong to this sampling, at this time. None as a name, or no time: nothing is kept."""
        if name is None or name != self._name:
            self._plans.clear()  # which a compiled model's last call still holds
            self._plans, self._shared = {}, {}
        elif timestep == self._timestep:
            return
        self._name, self._timestep, self._calls, self._first = name, timestep, 0, None
        self._named.clear()

    @property
    def goes_on(self) -> bool:
        """Has somebody named one?"""
        return self._name is not None

    def next_call(
        self, batch: Any = None, guidance: Guidance | None = None, called: Hashable = None
    ) -> KeptPlans | None:
        """What the call that begins now may use; None where nothing is kept.

        batch: its latents ``[B, C, ...]``. called: what its host calls it by, in whatever order calls come.
        """
        if self._name is None or self._timestep is None:
            return None
        self._calls += 1
        ordinal: Hashable = self._calls
        if called is not None:
            self._named[called] += 1
            ordinal = called, self._named[called]
        if guidance is None or type(batch) is not torch.Tensor or batch.is_meta:
            return KeptPlans(self._plans, ordinal, self._timestep, lambda: None)
        if self._calls == 1:
            self._first = batch
        look = partial(self._look, ordinal, guidance, batch, self._first)
        return KeptPlans(self._plans, ordinal, self._timestep, look)

    def _look(
        self, ordinal: Hashable, guidance: Guidance, batch: torch.Tensor, first: torch.Tensor | None
    ) -> Shared | None:
        """Hosts cut pictures into tiles, and put more into a step than they say: so each kind of call is looked at.

        Once in a sampling, at the first step, because a look waits for the device. first: what the time's first saw.
        """
        kind = (ordinal, guidance, *batch.shape)
        if kind not in self._shared:
            self._shared[kind] = _share(ordinal, guidance, batch, first)
        return self._shared[kind]

    def __getstate__(self) -> dict[str, Any]:
        return vars(Sampling())  # a copy's sampling is another


def _share(ordinal: Hashable, guidance: Guidance, batch: torch.Tensor, first: torch.Tensor | None) -> Shared | None:
    pictures, matched = guidance
    copies, rest = divmod(len(batch), pictures)
    for latents, call in ((first, 1), (batch, ordinal)):
        if rest == 0 and latents is not None and len(latents) >= pictures and _repeats(batch, latents[:pictures]):
            return Shared(len(batch), copies, min(matched, copies - 1), call)
    return None


def _repeats(batch: torch.Tensor, latents: torch.Tensor) -> bool:
    """Is it made of copies of these latents ``[P, C, ...]``, one after the other?"""
    if latents.device != batch.device or latents.shape[1:] != batch.shape[1:]:
        return False
    return bool((batch.unflatten(0, (-1, len(latents))) == latents).all())
