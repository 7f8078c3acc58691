"""Whose picture a call belongs to, and which step of it: what each thread knows, and samplings somebody has begun."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from ..settings.noise import Step
from .plan_cache import Guidance, Sampling

_LONGEST = 4096  # a longer tensor is no schedule
GuidanceOf = Callable[[torch.Tensor], Guidance | None]  # from the latents of a call


class Scope:
    """A sampling that somebody has begun. guidance_of: its calls' guidance; None where nobody tells.

    boundary: of the early phase in it, see `Clock.boundary_in`. is_known: nothing is to be learned of its steps.
    """

    def __init__(self, guidance_of: GuidanceOf | None, boundary: float | None = None, is_known: bool = False) -> None:
        self.guidance_of, self.boundary, self.is_known = guidance_of, boundary, is_known


class Pictures(threading.local):
    """What each thread knows of the picture it makes: pipelines that share a UNet may run at once."""

    def __init__(self) -> None:
        self.timesteps, self.sampling = Timesteps(), Sampling()
        self.scopes: list[Scope] = []  # samplings, the latest last
        self.told: Step | None = None  # the step of the UNet's next call, as the scheduler gave it


class Timesteps:
    """Tells what a step's timestep stands for without waiting for the device, by its place in the schedule.

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
