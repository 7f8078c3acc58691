"""The clock of a diffusers pipeline: its scheduler, asked outside the UNet and without waiting for the device."""

from __future__ import annotations

from typing import Any

import torch

from .runtime import Run
from .wrap import Wrap


class SchedulerClock(Wrap):
    """Around ``scheduler.scale_model_input``, which every pipeline calls with the timestep before the UNet.

    The scheduler's timesteps are brought to the CPU once a run; a step's timestep is a view into them, so its
    place there tells its value. That leaves a GPU undisturbed, and works where the UNet is compiled as a whole
    and cannot look at its own arguments.
    """

    def __init__(self, scheduler: Any, run: Run) -> None:
        super().__init__(scheduler, "scale_model_input")
        self.run = run
        self._known: torch.Tensor | None = None
        self._values: list[float] = []
        self._sampling = 0  # the pictures so far
        self._last: float | None = None  # what was told last

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the scheduler answers, after telling the run the time."""
        timestep = args[1] if len(args) > 1 else kwargs.get("timestep")
        if self.active and timestep is not None:
            value = self._number(timestep)
            self._count(value)
            self.run.tell(value, (id(self), self._sampling))
        return self.original(*args, **kwargs)

    def _count(self, value: float) -> None:
        """Time goes down while a picture is made; where it does not, another begins, or a sampler started over."""
        if self._last is None or value >= self._last:
            self._sampling += 1
        self._last = value

    def _number(self, timestep: Any) -> float:
        steps = getattr(self.target, "timesteps", None)
        if not torch.is_tensor(timestep) or not torch.is_tensor(steps):
            return float(timestep)
        if self._known is not steps:
            self._known, self._values, self._last = steps, steps.tolist(), None
        inside = timestep.untyped_storage().data_ptr() == steps.untyped_storage().data_ptr() and steps.is_contiguous()
        place = timestep.storage_offset() - steps.storage_offset()
        # a copy of the timestep, or one of somebody's own making, has to be waited for
        return self._values[place] if inside and 0 <= place < len(self._values) else float(timestep)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_known": None}
