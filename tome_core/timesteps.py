"""A scheduler's timesteps: one tensor for a picture; the place of an element tells its value and its picture."""

from __future__ import annotations

from typing import Any

import torch

_LONGEST = 4096  # a longer tensor is no schedule


class Timesteps:
    """Tells a step's value without waiting for the device, and to which picture the step belongs.

    What pipelines hand around is a view of one element of their scheduler's timesteps, so these are brought to the CPU
    once for a picture. They are held, so that no other tensor can come to lie where they are.
    """

    def __init__(self) -> None:
        self._steps: torch.Tensor | None = None
        self._version: int | None = None
        self._values: list[float] = []
        self._place = 0
        self._last: float | None = None  # the value that was read last
        self._pictures = 0

    def look(self, timestep: Any) -> tuple[float, int] | None:
        """The value, and the picture's number; None for what is no element of a schedule."""
        if type(timestep) is not torch.Tensor or timestep.is_meta or (timestep.numel() != 1 and any(timestep.stride())):
            return None
        storage, place = timestep.untyped_storage(), timestep.storage_offset()
        if not 1 < storage.nbytes() // timestep.element_size() <= _LONGEST:
            return None
        if not self._holds(timestep):
            self._steps = torch.empty(0, dtype=timestep.dtype, device=timestep.device).set_(storage)
            self._values, self._last = self._steps.tolist(), None
            self._version = _version(timestep)
            self._pictures += 1
        elif place < self._place or self._values[place] > self._values[self._place]:  # noise grows: another picture
            self._pictures += 1
        self._place = place
        return self._values[place], self._pictures

    def read(self, timestep: Any) -> tuple[float, int]:
        """The same for a timestep of somebody's own making, which has to be waited for.

        Time goes down while a picture is made; where it does not, another begins, or a sampler started over.
        """
        value = float(timestep)
        if self._last is None or value >= self._last:
            self._pictures += 1
        self._last = value
        return value, self._pictures

    def _holds(self, timestep: torch.Tensor) -> bool:
        held = self._steps
        if held is None or (held.dtype, held.device) != (timestep.dtype, timestep.device):
            return False
        same = held.untyped_storage().data_ptr() == timestep.untyped_storage().data_ptr()
        return same and self._version == _version(timestep)


def _version(timestep: torch.Tensor) -> int | None:
    """Tells whether somebody wrote into the schedule; not to be had of what inference mode made."""
    return None if timestep.is_inference() else timestep._version
