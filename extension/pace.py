"""The times of a pass, heard from its sampler, so that no step has to wait for the device."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

from ..tome_core.hosting import STABLE_DIFFUSION
from . import host

# functions of k-diffusion and their likes in the Forges: they call the model at the sigmas of their list, one after
# another, and say after each step's first call which it was
_BY_SIGMA = frozenset({
    "sample_ddpm", "sample_deis", "sample_dpm_2", "sample_dpm_2_ancestral", "sample_dpmpp_2m", "sample_dpmpp_2m_sde",
    "sample_dpmpp_2s_ancestral", "sample_dpmpp_3m_sde", "sample_dpmpp_sde", "sample_euler", "sample_euler_ancestral",
    "sample_heun", "sample_heunpp2", "sample_ipndm", "sample_ipndm_v", "sample_lcm", "sample_lms",
})  # fmt: skip
_SIGMA_MODULES = (
    "k_diffusion.sampling", "k_diff.k_diffusion.sampling", "ldm_patched.k_diffusion.sampling",
    "modules.sd_samplers_lcm", "backend.modules.k_diffusion_extra",
)  # fmt: skip
# the webui's own, by timesteps: from the last of their list down to the second; they say it at each step's end
_BY_TIMESTEP = frozenset({"ddim", "ddim_cfgpp", "plms", "plms_cfgpp"})
_TIMESTEP_MODULE = "modules.sd_samplers_timesteps_impl"


class Pace:
    """Stands in for a sampler's function: reads the list it is given, once, and hears each step that it reports.

    p: of the pass that is about to start, whose sampler is there already; None where nobody will ask. A second-order
    sampler's middle calls count as the step's end. Of a sampler that is not known, each step's time is read, which
    waits for the device.
    """

    def __init__(self, p: Any) -> None:
        self._times: list[dict[str, float]] = []
        self._place = 0
        self._timesteps: tuple[float, ...] | None = None
        sampler = getattr(p, "sampler", None)
        self._original = getattr(sampler, "func", None)
        self._put_on: Callable | None = None
        name = _list_of(self._original)
        if name:
            self._sampler = weakref.ref(sampler)  # an aborted job's model must not stay for us
            self._put_on = sampler.func = self._listening(self._original, name)

    def take_off(self) -> None:
        """Put the sampler's own function back, unless somebody else's is there."""
        sampler = self._sampler() if self._put_on is not None else None
        if sampler is not None and sampler.func is self._put_on:
            sampler.func = self._original

    def time(self, params: Any) -> dict[str, float]:
        """The time of the step that the denoiser announces, as a keyword for the engine's ``set_time``."""
        if params.sigma.device.type == "cpu" or not self._times:
            return host.read_time(params)
        # a call after the last step is at the last level that has noise
        return self._times[min(self._place, len(self._times) - 1)]

    def timesteps(self, p: Any) -> tuple[float, ...] | None:
        """Of all steps of the pass, for the engine's ``set_time``; None where the sampler's list is not known."""
        if self._timesteps is None and self._times:
            times = [host.relative(p, one) for one in self._times]
            self._timesteps = tuple(one["timestep"] if "timestep" in one
                                    else STABLE_DIFFUSION.timestep_of_sigma(one["sigma"]) for one in times)  # fmt: skip
        return self._timesteps

    def _listening(self, function: Callable, name: str) -> Callable:
        @functools.wraps(function)  # the webui looks at its parameters
        def listening(*args: Any, **kwargs: Any) -> Any:
            callback = kwargs.get("callback")
            if kwargs.get(name) is None or callback is None:
                return function(*args, **kwargs)
            listed = kwargs[name].tolist()
            ordered = listed[:-1] if name == "sigmas" else listed[:0:-1]
            self._times, self._place, self._timesteps = [{name[:-1]: float(one)} for one in ordered], 0, None
            return function(*args, **{**kwargs, "callback": lambda state: self._hear(state, callback)})

        return listening

    def _hear(self, state: dict[str, Any], callback: Callable) -> Any:
        if state.get("i") != self._place:
            self._times = []
        self._place += 1
        return callback(state)


def _list_of(function: Any) -> str:
    """The argument that lists the times a sampler's function calls the model at; "" where that is not known."""
    module, name = getattr(function, "__module__", ""), getattr(function, "__name__", "")
    if module in _SIGMA_MODULES and name in _BY_SIGMA:
        return "sigmas"
    return "timesteps" if module == _TIMESTEP_MODULE and name in _BY_TIMESTEP else ""
