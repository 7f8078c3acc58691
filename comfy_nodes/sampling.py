"""One sampling: the noise levels of its steps, and which of them its model is called at, without asking the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .engine import tome_core
from .percent import flow_time, percent_of, relative_sigma

# where sampler functions lie that call the model at the levels of their list, one after another, and say after each
# step's first call which it was
_KNOWN = ("comfy.k_diffusion.sampling", "comfy.extra_samplers.uni_pc", "comfy_extras.nodes_advanced_samplers")
_OF_THEIR_OWN = ("sample_dpm_fast", "sample_dpm_adaptive", "sample_ar_video")  # levels


class HostSampling:
    """What tells one sampling from all others, and its time.

    sampler, sigmas, noise: those of ``outer_sample``. The levels are read once, at the first call of the model. From
    the step that the sampler's callback reports follows the level of the calls after it: a second-order sampler's
    middle ones count as the step's end. A sampler of which that is not known is waited for at each call.
    """

    def __init__(self, sampler: Any = None, sigmas: Any = None, noise: Any = None) -> None:
        self._sigmas = sigmas
        # no noise of its own: it goes on with a picture that another sampling has begun. ComfyUI makes it on the CPU
        self._continues = torch.is_tensor(noise) and noise.device.type == "cpu" and not noise.any()
        self._timesteps: dict[tuple[int, bool], tuple[float, ...] | None] = {}
        self._pictures = len(noise) if torch.is_tensor(noise) else None
        self._levels: list[float] | None = None
        self._place = 0
        self._follows_list = _follows_list(sampler)
        self._percents: dict[tuple[int, float], float] = {}
        self._computed: set[int] = set()  # steps

    def hear(self, callback: Callable | None) -> Callable:
        """The sampler's callback, with us listening."""

        def heard(step: Any, *args: Any, **kwargs: Any) -> Any:
            if type(step) is not int or step != self._place:
                self._follows_list = False
            self._place += 1
            return callback(step, *args, **kwargs) if callback is not None else None

        return heard

    @property
    def steps_done(self) -> int:
        """How many steps the sampler has reported so far."""
        return self._place

    @property
    def steps_computed(self) -> int:
        """At how many steps the model was computed; others are those that EasyCache or LazyCache left out."""
        return len(self._computed)

    def note_call(self, options: dict[str, Any]) -> None:
        """A call of the model has been answered, by the model or by EasyCache. options: its transformer_options."""
        cache = options.get("easycache")  # LazyCache's has this place too, but answers before the model is called
        if getattr(cache, "name", "") != "EasyCache" or not getattr(cache, "skip_current_step", False):
            self._computed.add(self._place)

    def sigma(self, t: Any, options: dict[str, Any]) -> float:
        """The noise level of a call of the model. t: its sigmas, ``[B]``. options: its transformer_options."""
        if torch.is_tensor(t) and t.device.type != "cpu" and self._knows_levels(options.get("sample_sigmas")):
            # a call after the last step is at the last level that has noise
            return self._levels[min(self._place, len(self._levels) - 1)]
        return float(t.reshape(-1)[0]) if torch.is_tensor(t) else float(t)

    def pictures_in(self, x: Any, options: dict[str, Any]) -> int | None:
        """How many pictures a call of the model holds all conditions of; None for one that holds some of them alone.

        x: its latents, each picture's once for each condition. A window of a film holds some of the pictures.
        """
        conditions = options.get("cond_or_uncond")
        whole = conditions is not None and torch.is_tensor(x) and self._pictures is not None
        return self._pictures if whole and len(x) == len(conditions) * self._pictures else None

    def percent(self, sigma: float, model_sampling: Any) -> float:
        """Where the level lies on ComfyUI's scale; for the whole list at once, because each answer may wait."""
        key = id(model_sampling)
        if (key, sigma) not in self._percents:
            for one in {sigma, *(self._levels or ())}:
                self._percents[key, one] = percent_of(one, model_sampling)
        return self._percents[key, sigma]

    def timesteps(
        self, model_sampling: Any, options: dict[str, Any], flows: bool = False
    ) -> tuple[float, ...] | None:
        """Of all steps of this sampling; None where that is not known, and where it goes on with another's picture.

        On Stable Diffusion's schedule, or on `flow_time`'s scale where the model ``flows``. options: as of `sigma`.
        """
        key = id(model_sampling), flows
        if key not in self._timesteps:
            listed = options.get("sample_sigmas", self._sigmas)
            is_followed = self._follows_list and torch.is_tensor(listed)
            levels = self._levels or (listed.tolist()[:-1] if is_followed else ())
            known = () if self._continues else levels
            self._timesteps[key] = tuple(_timestep(one, model_sampling, flows) for one in known) or None
        return self._timesteps[key]

    def _knows_levels(self, listed: Any) -> bool:
        """Is the list in force the one that was read? listed: as it came to the sampler, past all other wrappers."""
        if not self._follows_list:
            return False
        sigmas = self._sigmas if listed is None else listed
        if self._levels is None:
            self._sigmas, self._levels = sigmas, sigmas.tolist()[:-1]
        self._follows_list = sigmas is self._sigmas and bool(self._levels)
        return self._follows_list


def steps_text(done: int, planned: int | None, stopped: bool = False, computed: int | None = None) -> str:
    """``20 steps``; ``12 of 20 steps`` where the sampling was stopped; "" where nobody knows.

    done: as its sampler reported, of which not all do. computed: with fewer than all ``20 steps, 13 of them computed``.
    """
    if planned is None:
        return ""
    count = tome_core.reporting.report_text.count(planned, "step")
    if stopped and done < planned:
        return f"{done} of {count}"
    return f"{count}, {computed} of them computed" if done == planned and computed and computed < planned else count


def _follows_list(sampler: Any) -> bool:
    function = getattr(sampler, "sampler_function", None)
    name = getattr(function, "__name__", "")
    return getattr(function, "__module__", "") in _KNOWN and name not in _OF_THEIR_OWN


def _timestep(sigma: float, model_sampling: Any, flows: bool) -> float:
    time = flow_time(sigma, model_sampling) if flows else None
    if time is not None:
        return time
    return tome_core.settings.noise.STABLE_DIFFUSION.timestep_of_sigma(relative_sigma(sigma, model_sampling))
