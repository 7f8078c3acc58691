"""The samplings of pictures: which calls belong to one picture, and which of them see the same latents."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from .own_error import OwnError
from .plan_cache import KeptPlans, Plans

Guidance = tuple[int, int]  # (pictures, number of the copy that is matched), see `Sampling`


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
        self._step = 0  # number of timesteps of this sampling so far
        self._calls: Counter[Hashable] = Counter()  # at this timestep, by name
        self._plans: dict[tuple, Plans] = {}
        self._own_error = OwnError()
        self._first: tuple[Hashable, torch.Tensor] | None = None  # the first guided call at this timestep
        self._shared: dict[tuple, tuple[int, int, int, Hashable] | None] = {}  # by kind of call

    def set(self, name: Hashable, timestep: float | None) -> None:
        """Set the sampling's name and the timestep of the next calls. If either is None, they use and keep no plan.

        Another name, or None as the name, drops all kept plans. Another name or timestep restarts the count of calls.
        """
        if name is None or name != self.name:
            self._plans.clear()  # a compiled model's last call still holds this dict
            self._plans, self._shared, self._own_error, self._step = {}, {}, OwnError(), 0
        elif timestep == self._timestep:
            return
        self.name, self._timestep, self._first = name, timestep, None
        self._step += 1
        self._calls.clear()

    def next_call(self, batch: Any = None, called: Hashable = None) -> KeptPlans | None:
        """Count a call that begins now, and return the kept plans for it; None if no plan is used or kept.

        `batch` is the call's latents ``[B, C, ...]``. With guidance, plans are shared if it only repeats its own first
        pictures or those of the first guided call at this timestep. `called` is the host's name for the call, or None;
        calls of different names may come in any order.
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
        self._own_error.begin(self._timestep)
        return KeptPlans(self._plans, ordinal, self._timestep, shared, self._own_error, self._step)

    def _guidance_in(self, batch: Any) -> Guidance | None:
        """Return `guidance_of` the batch, (1, 0) for one expanded latent; None if it has no values or guidance."""
        if type(batch) is not torch.Tensor or batch.is_meta or batch.dim() < 2:
            return None
        return (1, 0) if len(batch) > 1 and batch.stride(0) == 0 else self.guidance_of(batch)  # one latent, expanded


def _share(
    batch: torch.Tensor, guidance: Guidance, calls: Sequence[tuple[Hashable, torch.Tensor]]
) -> tuple[int, int, int, Hashable] | None:
    """Return `KeptPlans.shared` if `batch` consists of copies of a call's pictures, else None; waits for the device.

    `calls` are (ordinal, latents), and the first one that fits counts. `guidance` is (pictures, the copy that is
    matched): a call's pictures are the first so many of its latents.
    """
    pictures, matched = guidance
    copies, rest = divmod(len(batch), pictures)
    for ordinal, latents in calls:
        first = latents[:pictures]
        comparable = (len(first), first.shape[1:], first.device) == (pictures, batch.shape[1:], batch.device)
        if rest == 0 and comparable and bool((batch.unflatten(0, (copies, pictures)) == first).all()):
            return len(batch), copies, min(matched, copies - 1), ("shared", ordinal)
    return None


class Samplings(threading.local):
    """The samplings that go on in each thread, the latest last: pipelines that share a UNet may run at once."""

    def __init__(self) -> None:
        self.begun: list[Sampling] = []

    @property
    def latest(self) -> Sampling | None:
        """The running sampling that this thread began last, never that of `ModelTime.set`; None if none runs."""
        return self.begun[-1] if self.begun else None
