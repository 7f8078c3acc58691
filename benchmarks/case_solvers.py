"""The samplers of the cases, each by diffusers' own scheduler with its timesteps set."""

from __future__ import annotations

from functools import partial
from typing import Any

from diffusers import (
    DDPMScheduler,
    DPMSolverMultistepScheduler,
    EulerAncestralDiscreteScheduler,
    EulerDiscreteScheduler,
    HeunDiscreteScheduler,
    LCMScheduler,
)

from benchmarks import schedules
from demo import sampler
from demo.model import SceneModel

_MOST_NOISE = 0.999  # of a training step, where a solver has no answer to pure noise
HYPER_TIME = 800  # at which Hyper-SD draws in a single step


def _demo(model: SceneModel, steps: int, schedule: str = schedules.UNIFORM) -> Any:
    return sampler.solver(model, steps, schedules.timesteps(schedule, model.scheduler, steps))


def _of_class(kind: type, model: SceneModel, steps: int, **more: Any) -> Any:
    made = kind(**{**sampler.solver_config(model), "timestep_spacing": "trailing", **more})
    made.set_timesteps(steps)
    return made


def _edm(model: SceneModel, steps: int) -> Any:
    """Karras et al. 2022 altogether: their sigmas and Heun's second order, all steps but the last of two calls."""
    config = sampler.solver_config(model)
    kept = {name: value for name, value in config.items() if not name.startswith(("beta", "rescale"))}
    betas = DDPMScheduler(**model.scheduler).betas.clamp(max=_MOST_NOISE)
    made = HeunDiscreteScheduler(**kept, trained_betas=betas.tolist())
    made.set_timesteps(timesteps=schedules.timesteps(schedules.KARRAS, model.scheduler, steps))
    return made


def _hyper(model: SceneModel, steps: int) -> Any:
    made = LCMScheduler(**sampler.solver_config(model))
    made.set_timesteps(timesteps=[HYPER_TIME])
    return made


# (model, steps) -> a scheduler
SOLVERS = {
    "DPM++ 2M": _demo,
    "Karras": partial(_demo, schedule=schedules.KARRAS),
    "exponential": partial(_demo, schedule=schedules.EXPONENTIAL),
    "AYS": partial(_demo, schedule=schedules.AYS),
    "Euler": partial(_of_class, EulerDiscreteScheduler),
    "ancestral": partial(_of_class, EulerAncestralDiscreteScheduler),
    "SDE": partial(_of_class, DPMSolverMultistepScheduler, algorithm_type="sde-dpmsolver++", final_sigmas_type="zero"),
    "EDM": _edm,
    "LCM": partial(_of_class, LCMScheduler, timestep_spacing="leading"),
    "Hyper": _hyper,
}
