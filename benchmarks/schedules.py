"""How whole pictures of a scene model are made: which timesteps a solver runs, what it starts from, and guidance.

What merging may do without depends on how noisy the steps are, and samplers differ in that.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from diffusers import DDPMScheduler
from diffusers.schedulers import AysSchedules

from demo.sampler import GUIDANCE

UNIFORM, KARRAS, LATE_HALF, EXPONENTIAL, AYS = "uniform", "karras", "late-half", "exponential", "ays"
SCHEDULES = (UNIFORM, KARRAS, LATE_HALF, EXPONENTIAL, AYS)
NOISIEST = 14.6  # Stable Diffusion's highest sigma; a schedule that ends in pure noise has none
_RHO = 7  # Karras et al. 2022, section 3


class Manner(NamedTuple):
    """One way to make pictures. late-half: a picture at half of the times, as img2img and hires passes start."""

    schedule: str = UNIFORM
    guidance: float = GUIDANCE


AS_THE_DEMO = Manner()


def timesteps(schedule: str, config: dict[str, Any], steps: int) -> list[int] | None:
    """The `steps` timesteps to run, the noisiest first; None for the solver's own. config: of the noise schedule."""
    if schedule == UNIFORM:
        return None
    count = config["num_train_timesteps"]
    if schedule == LATE_HALF:
        return (np.arange(count / 2, 0, -count / 2 / steps).round() - 1).astype(int).tolist()[:steps]
    kept = DDPMScheduler(**config).alphas_cumprod.double().numpy()
    sigmas = np.sqrt((1 - kept[kept > 0]) / kept[kept > 0])
    return _nearest(sigmas, _SPACED[schedule](min(NOISIEST, sigmas[-1]), sigmas[0], steps))


def _karras(first: float, last: float, steps: int) -> np.ndarray:
    """Evenly spaced in their `_RHO`-th root."""
    return np.linspace(first ** (1 / _RHO), last ** (1 / _RHO), steps) ** _RHO


def _aligned(first: float, last: float, steps: int) -> np.ndarray:
    """Align Your Steps (Sabour et al. 2024), ten of them; other numbers between those, as its authors do."""
    ten = np.log(AysSchedules["StableDiffusionSigmas"][:-1])  # the last one is 0, the finished picture
    return np.exp(np.interp(np.linspace(0, 1, steps), np.linspace(0, 1, len(ten)), ten))


_SPACED = {KARRAS: _karras, EXPONENTIAL: np.geomspace, AYS: _aligned}  # sigmas, from the first to the last


def _nearest(sigmas: np.ndarray, wanted: np.ndarray) -> list[int]:
    """Timesteps of the nearest of the model's `sigmas`, each of them once."""
    found = np.interp(np.log(wanted), np.log(sigmas), np.arange(len(sigmas)))
    return list(dict.fromkeys(found.round().astype(int).tolist()))
