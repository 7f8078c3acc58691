"""At which step a pipeline is, by its scheduler's own count: a timestep among arguments would be waited for."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from ..settings.noise import Step, by_timestep


class PipelineSteps:
    """Of a pipeline, which is asked anew which scheduler it has. In `Run.noise`'s place.

    A flow model's timesteps are 1000 times its sigma, and stand for Stable Diffusion's of the same number.
    """

    def __init__(self, pipeline: Any) -> None:
        self._pipeline = weakref.ref(pipeline)

    def now(self) -> torch.Tensor | None:
        """Of the next call, an element of its scheduler's timesteps; None where the scheduler does not count."""
        scheduler = getattr(self._pipeline(), "scheduler", None)
        steps = getattr(scheduler, "timesteps", None)
        if not hasattr(scheduler, "step_index") or not torch.is_tensor(steps) or steps.dim() != 1:
            return None
        index = scheduler.step_index
        if index is None:  # before the first step
            index = getattr(scheduler, "begin_index", None) or 0
        return steps[index] if index < len(steps) else None

    def steps_of(self, values: list[float]) -> list[Step]:
        """What the scheduler's ``values``, all that its ``timesteps`` hold, stand for."""
        return [by_timestep(value) for value in values]

    def step_of(self, value: float) -> Step:
        """The same for one of them."""
        return by_timestep(value)
