"""The steps of a live diffusers scheduler: the time of each, read from its timesteps, sigmas and betas."""

from __future__ import annotations

import math
import weakref
from typing import Any

import torch

from ..settings.schedule import STABLE_DIFFUSION, NoiseSchedule, Time, value_at

_DIGITS = 1  # decimals of a timestep; float32 schedules are exact to a hundredth
_TINY = 1e-12
_LONGEST = 4096  # the most elements of a schedule; a longer tensor is none
_MOST = 4  # number of schedules that are remembered


class SchedulerNoise:
    """The times of the steps of a pipeline's scheduler, for a timestep that the model was called with.

    A search gives a list of `Time`: that of the step found, then those of all later steps; empty if none is found. Try
    `steps_by_memory` first, which does not wait for a tensor's value, then `steps_from` with the value. The pipeline,
    which is held weakly, may get another scheduler at any time. A pickled or copied object becomes None.
    """

    def __init__(self, pipeline: Any) -> None:
        self._seen: dict[tuple, tuple[torch.Tensor, list[Time]]] = {}
        self._pipeline = weakref.ref(pipeline)

    def steps_of(self, values: list[float]) -> list[Time]:
        """Return a time for each of these timesteps: all of the scheduler's, maybe with more after them, or others.

        A time has the timestep of Stable Diffusion's schedule with equal noise, and the percent of the schedule of
        the model's training. If a scheduler's noise is not known, its timesteps are taken to be Stable Diffusion's.
        """
        scheduler = self._scheduler()
        sigmas = _sigmas(scheduler, values)
        if sigmas is None:
            return [STABLE_DIFFUSION.time_of(value) for value in values]
        schedule = training_schedule(scheduler) or STABLE_DIFFUSION
        return [Time(round(STABLE_DIFFUSION.timestep_of_sigma(sigma), _DIGITS),
                     schedule.percent_of(round(schedule.timestep_of_sigma(sigma), _DIGITS)))
                for sigma in sigmas]  # fmt: skip

    def steps_by_memory(self, timestep: Any) -> list[Time]:
        """Return the times of a step and of all later ones; empty if the argument is no element of a schedule's tensor.

        The step is found by its position in memory, because pipelines pass views of their scheduler's timesteps, also
        expanded over the batch. The schedule is copied to the CPU at its first step; later steps do not wait for the
        device. The tensors of the latest four schedules are kept, so that no other tensor gets their addresses.
        """
        if type(timestep) is not torch.Tensor or timestep.is_meta or (timestep.numel() != 1 and any(timestep.stride())):
            return []
        storage = timestep.untyped_storage()
        if not 1 < storage.nbytes() // timestep.element_size() <= _LONGEST:
            return []
        version = None if timestep.is_inference() else timestep._version  # changes when the tensor is written to
        key = storage.data_ptr(), timestep.dtype, timestep.device, version
        known = self._seen.get(key)
        if known is None:
            steps = torch.empty(0, dtype=timestep.dtype, device=timestep.device).set_(storage)
            known = steps, self.steps_of(steps.tolist())
            self._seen = {**dict([*self._seen.items()][1 - _MOST :]), key: known}  # another thread may read the old one
        return known[1][timestep.storage_offset() :]

    def steps_from(self, value: float) -> list[Time]:
        """Return the times of the scheduler's first step with this timestep and of all later ones; empty if none."""
        known = _list(self._scheduler(), "timesteps")
        return self.steps_of(known)[known.index(value) :] if value in known else []

    def _scheduler(self) -> Any:
        """Return the pipeline's scheduler; None if there is no pipeline any more, or no scheduler."""
        return getattr(self._pipeline(), "scheduler", None)

    def __reduce__(self) -> tuple:
        return type(None), ()  # a copy of the UNet has no pipeline


class PipelineSteps(SchedulerNoise):
    """The steps of a pipeline. `now` goes by its scheduler's count: reading a timestep argument would wait for the GPU.

    `now` is the scheduler's own timestep, in a flow model 1000 times sigma. A `Time` takes it as Stable Diffusion's, or
    1000 minus it if the timesteps count up.
    """

    def now(self) -> torch.Tensor | None:
        """Return the next call's timestep, an element of ``timesteps``; None if none is left or it is not known."""
        scheduler = self._scheduler()
        steps = getattr(scheduler, "timesteps", None)
        if not hasattr(scheduler, "step_index") or not torch.is_tensor(steps) or steps.dim() != 1:
            return None
        index = scheduler.step_index
        if index is None:  # before the first step
            index = getattr(scheduler, "begin_index", None) or 0
        return steps[index] if index < len(steps) else None

    def steps_of(self, values: list[float]) -> list[Time]:
        """Return a time for each timestep; Mochi's, with ``invert_sigmas`` in the config, count up from noise."""
        counts_from_noise = getattr(self._scheduler(), "config", {}).get("invert_sigmas")
        return [STABLE_DIFFUSION.time_of(1000 - value if counts_from_noise else value) for value in values]


def training_schedule(scheduler: Any) -> NoiseSchedule | None:
    """Return the noise schedule of the model's training, from a diffusers scheduler's betas; None if it shows none."""
    betas = _list(scheduler, "betas")
    # without alphas_cumprod, betas are those of the sampling's steps
    trained = torch.is_tensor(getattr(scheduler, "alphas_cumprod", None))
    return NoiseSchedule(tuple(betas)) if trained and betas else None


def _sigmas(scheduler: Any, values: list[float]) -> list[float] | None:
    """Return the noise's standard deviation at these timesteps, relative to data of unit variance; None if not known.

    Values after the scheduler's own ``timesteps`` get its last sigma.
    """
    config = getattr(scheduler, "config", {})
    timesteps, sigmas, alphas_cumprod = (_list(scheduler, name) for name in ("timesteps", "sigmas", "alphas_cumprod"))
    # by index only if the values are the scheduler's current schedule: another pipeline may use another schedule
    count = len(timesteps) if values[: len(timesteps)] == timesteps else 0
    if 0 < count <= len(sigmas):
        if config.get("prediction_type") == "flow_prediction" or config.get("use_flow_sigmas"):
            # x = sigma * noise + (1 - sigma) * data
            result = [sigma / max(1 - sigma, _TINY) for sigma in sigmas[:count]]
        else:
            sigma_data = config.get("sigma_data") or 1.0  # the data's standard deviation
            result = [sigma / sigma_data for sigma in sigmas[:count]]
        return result + result[-1:] * (len(values) - count)  # the schedule may be the beginning of a longer tensor
    # the share of the picture's variance that is left at each training step
    shares = (value_at(alphas_cumprod, value) for value in values)
    return [math.sqrt((1 - share) / max(share, _TINY)) for share in shares] if alphas_cumprod else None


def _list(scheduler: Any, name: str) -> list[float]:
    """Return an attribute of the scheduler, a one-dimensional tensor, as a list; empty if it is no such tensor."""
    values = getattr(scheduler, name, None)
    return values.tolist() if torch.is_tensor(values) and values.dim() == 1 else []
