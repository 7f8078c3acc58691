"""The times of a pass, heard from its sampler, so that no step has to wait for the device."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

from ..tome_core.hosting import STABLE_DIFFUSION, Steps
from . import host

# where functions of k-diffusion and their likes in the Forges lie: those that are given a list of sigmas call the model
# at them, one after another, and say after each step's first call which it was
_SIGMA_MODULES = (
    "k_diffusion.sampling", "k_diff.k_diffusion.sampling", "ldm_patched.k_diffusion.sampling",
    "modules.sd_samplers_lcm", "backend.modules.k_diffusion_extra",
)  # fmt: skip
# the webui's own, by timesteps: from the last of their list down to the second; they say it at each step's end
_BY_TIMESTEP = frozenset({"ddim", "ddim_cfgpp", "plms", "plms_cfgpp"})
_TIMESTEP_MODULE = "modules.sd_samplers_timesteps_impl"


class Pace:
    """Stands in for a sampler's function: reads the list it is given, once, and hears each step that it reports.

    p: of the pass that is about to start, whose sampler is there already. asks: will anybody ask for times? A
    second-order sampler's middle calls count as the step's end. A sampler that is not known is waited for at each step.
    """

    def __init__(self, p: Any, asks: bool) -> None:
        self.heard = Steps()
        self._timesteps: tuple[float, ...] | None = None
        self._calls_live = 0  # of the model
        self._live: dict[int, bool] = {}  # by step: did its first call merge?
        sampler = getattr(p, "sampler", None)
        self._sampler = (lambda: None) if sampler is None else weakref.ref(sampler)  # an aborted job's must not stay
        self._original = getattr(sampler, "func", None)
        self.sampler = getattr(self._original, "__qualname__", "")
        name, heard = _list_of(self._original) if asks else "", getattr(sampler, "callback_state", None)
        if name:
            sampler.func = self._listening(self._original, name)
        if heard is not None:
            sampler.callback_state = self.heard.listening(heard, lambda state: state.get("i"))

    def take_off(self) -> None:
        """Put the sampler's own functions back, unless somebody else's are there."""
        sampler = self._sampler()
        if getattr(getattr(sampler, "func", None), "pace", None) is self:
            sampler.func = self._original
        if getattr(getattr(sampler, "callback_state", None), "steps", None) is self.heard:
            del sampler.callback_state

    def note_call(self, is_live: bool, *kind: Any) -> None:
        """The model is called; does it merge? kind: as of `Steps.call`."""
        self.heard.call(*kind)
        self._calls_live += is_live
        self._live.setdefault(self.heard.done, is_live)

    def counts(self) -> dict[str, int]:
        """How many there were; of a sampler that was not heard each call is a step."""
        done, calls, live = self.heard.done, self.heard.calls, self._calls_live
        if done:
            live = done if live == calls else min(done, sum(self._live.values()))
        return {"calls": calls, "steps": done or calls, "steps_merged": live}

    def time(self, params: Any) -> dict[str, float]:
        """The time of the step that the denoiser announces, as a keyword for the engine's ``set_time``."""
        return (None if params.sigma.device.type == "cpu" else self.heard.time) or host.read_time(params)

    def timesteps(self, p: Any) -> tuple[float, ...] | None:
        """Of all steps of the pass, for the engine's ``set_time``; None where the sampler's list is not known."""
        if self._timesteps is None and self.heard.times and self.heard.follows:
            times = [host.relative(p, one) for one in self.heard.times]
            self._timesteps = tuple(one["timestep"] if "timestep" in one
                                    else STABLE_DIFFUSION.timestep_of_sigma(one["sigma"]) for one in times)  # fmt: skip
        return self._timesteps

    def _listening(self, function: Callable, name: str) -> Callable:
        @functools.wraps(function)  # the webui looks at its parameters
        def listening(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get(name) is not None and kwargs.get("callback") is not None:
                listed = kwargs[name].tolist()
                ordered = listed[:-1] if name == "sigmas" else listed[:0:-1]
                self.heard.begin([{name[:-1]: float(one)} for one in ordered])
                self._timesteps = None
            return function(*args, **kwargs)

        listening.pace = self
        return listening


def _list_of(function: Any) -> str:
    """The argument that lists the times a sampler's function calls the model at; "" where that is not known."""
    module, name = getattr(function, "__module__", ""), getattr(function, "__name__", "")
    if module in _SIGMA_MODULES:
        return "sigmas"
    return "timesteps" if module == _TIMESTEP_MODULE and name in _BY_TIMESTEP else ""
