"""Plans that serve several steps of one sampling, and never a step of another."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple


class KeptPlans(NamedTuple):
    """What one call of the UNet finds of earlier ones, and leaves for later ones.

    ordinal: the call's number among those at its time, which are several where a host splits a batch or a picture.
    """

    plans: dict[tuple, Kept]
    ordinal: int
    timestep: float


class Kept(NamedTuple):
    """A block's plans, the timestep they were made at, and the rule they were made for."""

    plans: Any
    timestep: float
    rule: Any


class Sampling:
    """Which sampling is going on, at which time.

    A picture must not depend on the picture before it. So plans are kept within a sampling that somebody from
    outside has named, by the shape of the call and by its ordinal: tiles of one size, and the halves of a split
    batch, look alike otherwise.
    """

    def __init__(self) -> None:
        self._name: Hashable = None
        self._timestep: float | None = None
        self._calls = 0
        self._plans: dict[tuple, Kept] = {}

    def set(self, name: Hashable, timestep: float | None) -> None:
        """The next calls belong to this sampling, at this time. None as a name, or no time: nothing is kept."""
        if name is None or name != self._name:
            self._plans = {}
        elif timestep == self._timestep:
            return
        self._name, self._timestep, self._calls = name, timestep, 0

    def next_call(self) -> KeptPlans | None:
        """What the call that begins now may use; None where nothing is kept."""
        if self._name is None or self._timestep is None:
            return None
        self._calls += 1
        return KeptPlans(self._plans, self._calls, self._timestep)

    def __getstate__(self) -> dict[str, Any]:
        return vars(Sampling())  # a copy's sampling is another
