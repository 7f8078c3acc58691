"""The noise levels of a pass, taken from its sampler, so that no step has to wait for the device."""

import functools
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

from ..tome_core.hosting import STABLE_DIFFUSION, Steps
from . import host

# modules of k-diffusion's sampler functions and the Forges' versions: given a list of sigmas, they call the model at
# these in order, and report each step after its first call
_SIGMA_MODULES = (
    "k_diffusion.sampling", "k_diff.k_diffusion.sampling", "ldm_patched.k_diffusion.sampling",
    "modules.sd_samplers_lcm", "backend.modules.k_diffusion_extra",
)  # fmt: skip
# the webui's own functions by timesteps: they go from the last of their list to the second, and report each step's end
_BY_TIMESTEP = frozenset({"ddim", "ddim_cfgpp", "plms", "plms_cfgpp"})
_TIMESTEP_MODULE = "modules.sd_samplers_timesteps_impl"


class Counts(NamedTuple):
    """How many model calls and steps one pass of one batch had, and how many of the steps merged."""

    calls: int  # of the model
    steps: int  # as they were asked for: of a stopped pass too, and however its sampler counts
    merged: int  # of these steps


class SamplerTimes:
    """The counts of a pass's steps and model calls, and the noise levels of all steps.

    The sampler's function and its callback are replaced until `take_off`. The function's list of noise levels is read
    once if `asks`, so that no step waits for the device. If a list is not known, the level is read at each step.
    """

    def __init__(self, p: Any, asks: bool) -> None:
        self.timed_steps = Steps()  # the counts of steps and calls, and the steps' times
        self.planned = 0  # steps of this pass by the webui's progress; 0 if they are not known
        self._timesteps: tuple[float, ...] | None = None
        self._calls_live = 0  # merged calls of the model
        self._live: dict[int, bool] = {}  # by step: its first call merged
        sampler = getattr(p, "sampler", None)
        self._sampler = (lambda: None) if sampler is None else weakref.ref(sampler)  # an aborted job's is not kept
        self._original = getattr(sampler, "func", None)
        self.sampler = getattr(self._original, "__qualname__", "")  # the function's name; "" if there is none
        name, heard = _list_of(self._original) if asks else "", getattr(sampler, "callback_state", None)
        if name:
            sampler.func = self._listening(self._original, name)
        if heard is not None:
            sampler.callback_state = self.timed_steps.counting_callback(heard, lambda state: state.get("i"))

    def take_off(self) -> None:
        """Put the sampler's own functions back, unless another extension has replaced them."""
        sampler = self._sampler()
        if getattr(getattr(sampler, "func", None), "tome_sampler_times", None) is self:
            sampler.func = self._original
        if getattr(getattr(sampler, "callback_state", None), "steps", None) is self.timed_steps:
            del sampler.callback_state

    def note_call(self, is_live: bool, *kind: Any) -> None:
        """Count a call for `counts`; it merges if `is_live`. `kind`: latents, then what else its time depends on."""
        self.timed_steps.call(*kind)
        self._calls_live += is_live
        self._live.setdefault(self.timed_steps.done, is_live)

    def counts(self, is_whole: bool) -> Counts:
        """Return the counts; if the pass `is_whole`, all `planned` steps were done, also if the sampler reports fewer.

        The steps are the reported ones if no number is planned, and calls if none is reported either.
        """
        done, calls, live = self.timed_steps.done, self.timed_steps.calls, self._calls_live
        if done:
            live = done if live == calls else min(done, sum(self._live.values()))
        done = done or calls
        steps = self.planned or done
        if is_whole and 0 < live < done:  # the same share of the planned steps: some of them, but not all
            live = max(1, min(round(live / done * steps), steps - 1))
        elif is_whole and live:
            live = steps
        return Counts(calls, steps, min(live, steps))

    def time(self, params: Any) -> dict[str, float]:
        """Return the step's {"sigma": ...} or {"timestep": ...}: from the sampler's list, or by `host.read_time`."""
        return (None if params.sigma.device.type == "cpu" else self.timed_steps.time) or host.read_time(params)

    def timesteps(self, p: Any) -> tuple[float, ...] | None:
        """Return all steps' timesteps on Stable Diffusion's schedule; None until a list is known and followed."""
        if self._timesteps is None and self.timed_steps.times and self.timed_steps.follows:
            times = [host.to_unit_variance(p, time) for time in self.timed_steps.times]
            self._timesteps = tuple(time["timestep"] if "timestep" in time
                                    else STABLE_DIFFUSION.timestep_of_sigma(time["sigma"])
                                    for time in times)  # fmt: skip
        return self._timesteps

    def _listening(self, function: Callable, name: str) -> Callable:
        """Return a sampler function that first puts the times in its argument `name`, in order, into `timed_steps`."""
        @functools.wraps(function)  # the webui inspects its parameters
        def listening(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get(name) is not None and kwargs.get("callback") is not None:
                listed = kwargs[name].tolist()
                ordered = listed[:-1] if name == "sigmas" else listed[:0:-1]
                self.timed_steps.begin([{name[:-1]: float(time)} for time in ordered])
                self._timesteps = None
            return function(*args, **kwargs)

        listening.tome_sampler_times = self
        return listening


def _list_of(function: Any) -> str:
    """Name a sampler function's list of times: "sigmas" by its module, "timesteps" by module and name, else ""."""
    module, name = getattr(function, "__module__", ""), getattr(function, "__name__", "")
    if module in _SIGMA_MODULES:
        return "sigmas"
    return "timesteps" if module == _TIMESTEP_MODULE and name in _BY_TIMESTEP else ""
