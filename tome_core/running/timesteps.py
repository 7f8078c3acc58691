"""A scheduler's timesteps: one tensor for a picture, the place of an element in which tells its step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_LONGEST = 4096  # a longer tensor is no schedule


class Timesteps:
    """Tells what a step's timestep stands for without waiting for the device.

    Pipelines hand around views of their scheduler's timesteps, which are brought to the CPU once for a picture, and
    held, so that no other tensor comes to lie where they are.
    """

    def __init__(self) -> None:
        self._steps: torch.Tensor | None = None
        self._version: int | None = None
        self._meanings: list[Any] = []

    def look(self, timestep: Any, meanings: Callable[[list[float]], list[Any]]) -> Any | None:
        """What the step means, by ``meanings`` of its whole schedule, asked once; None for no element of a schedule."""
        if type(timestep) is not torch.Tensor or timestep.is_meta or (timestep.numel() != 1 and any(timestep.stride())):
            return None
        storage = timestep.untyped_storage()
        if not 1 < storage.nbytes() // timestep.element_size() <= _LONGEST:
            return None
        if not self._holds(timestep):
            self._steps = torch.empty(0, dtype=timestep.dtype, device=timestep.device).set_(storage)
            self._meanings = meanings(self._steps.tolist())
            self._version = _version(timestep)
        return self._meanings[timestep.storage_offset()]

    def from_here(self, timestep: torch.Tensor) -> list[Any]:
        """What this step, which was looked at last, and those after it in its schedule mean."""
        return self._meanings[timestep.storage_offset() :]

    def _holds(self, timestep: torch.Tensor) -> bool:
        held = self._steps
        alike = held is not None and (held.dtype, held.device) == (timestep.dtype, timestep.device)
        same = alike and held.untyped_storage().data_ptr() == timestep.untyped_storage().data_ptr()
        return same and self._version == _version(timestep)


def _version(timestep: torch.Tensor) -> int | None:
    """Tells whether somebody wrote into the schedule; not to be had of what inference mode made."""
    return None if timestep.is_inference() else timestep._version
