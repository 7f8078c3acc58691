"""One sampling: the noise levels of its steps, and which of them its model is called at, without asking the device."""

from __future__ import annotations

from typing import Any

import torch

from .host import hosting

# where functions lie that call the model at their list's levels, one after another, and report each step's first call
_KNOWN = ("comfy.k_diffusion.sampling", "comfy.extra_samplers.uni_pc", "comfy_extras.nodes_advanced_samplers")
_OF_THEIR_OWN = ("sample_dpm_fast", "sample_dpm_adaptive", "sample_ar_video")  # levels
_PURE_NOISE = 1e6  # relative to the picture; where there is nothing of it, its share is infinite


class HostSampling:
    """The time of one sampling. sampler, sigmas, noise: those of ``outer_sample``. stopped: it ended by an exception.

    The levels are read once, at the first call. From the step that a known sampler reports follows the level of the
    calls after it: a second-order one's middle calls count as the step's end. Others are waited for at each call.
    """

    def __init__(self, sampler: Any = None, sigmas: Any = None, noise: Any = None) -> None:
        # no noise of its own: it goes on with a picture that another sampling has begun. ComfyUI makes it on the CPU
        self._continues = torch.is_tensor(noise) and noise.device.type == "cpu" and not noise.any()
        self._pictures, self.stopped = len(noise) if torch.is_tensor(noise) else None, False
        self._sigmas, self._planned = sigmas, max(0, len(sigmas) - 1) if hasattr(sigmas, "__len__") else 0
        function = getattr(sampler, "sampler_function", None)
        follows = getattr(function, "__module__", "") in _KNOWN and function.__name__ not in _OF_THEIR_OWN
        self.heard, self.sampler = hosting.Steps(follows), getattr(function, "__qualname__", "")
        self._known: dict[tuple, Any] = {}  # what a model's own schedule was asked, each of which may wait
        self._computed: set[int] = set()  # steps; others are those that EasyCache or LazyCache left out

    @property
    def steps(self) -> dict[str, int]:
        """How many are done, as the sampler reported, if it does; planned, 0 if nobody knows; and were computed."""
        return {"steps": self.heard.done, "steps_planned": self._planned, "steps_computed": len(self._computed)}

    @property
    def text(self) -> str:
        """``20 steps``; ``12 of 20 steps`` if it was stopped; ``20 steps, 13 of them computed``; "" if nobody knows."""
        done, planned, computed = self.steps.values()
        count = hosting.count(planned, "step")
        if self.stopped and done < planned:
            return f"{done} of {count}"
        is_part = done == planned and 0 < computed < planned
        return f"{count}, {computed} of them computed" if is_part else count if planned else ""

    def note_call(self, options: dict[str, Any]) -> None:
        """A call of the model has been answered, by the model or by EasyCache. options: its transformer_options."""
        if not is_left_out(options):
            self._computed.add(self.heard.done)

    def sigma(self, t: Any, options: dict[str, Any]) -> float:
        """The noise level of a call of the model. t: its sigmas, ``[B]``. options: its transformer_options."""
        if torch.is_tensor(t) and t.device.type != "cpu" and self._levels_in(options):
            return self.heard.time
        return float(t.reshape(-1)[0]) if torch.is_tensor(t) else float(t)

    def pictures_in(self, x: Any, options: dict[str, Any]) -> int | None:
        """How many pictures a call with these latents holds all conditions of; None for one that holds some alone."""
        conditions = options.get("cond_or_uncond")
        whole = conditions is not None and torch.is_tensor(x) and self._pictures is not None
        return self._pictures if whole and len(x) == len(conditions) * self._pictures else None

    def is_between(self, start: float, end: float, sigma: float, model_sampling: Any) -> bool:
        """Does a noise level lie between two percents, both of them included, as ComfyUI's own nodes see it?"""
        key = id(model_sampling), start, end
        if key not in self._known:
            self._known[key] = [model_sampling.percent_to_sigma(one) for one in (start, end)]
        first, last = self._known[key]
        return last <= sigma <= first

    def timesteps(self, model_sampling: Any, options: dict[str, Any], flows: bool = False) -> tuple[float, ...] | None:
        """Of all steps, as of `timestep_of`; None if they are not known, or if it goes on with another's picture."""
        key = id(model_sampling), flows
        if key not in self._known:
            levels = [] if self._continues else self._levels_in(options)
            self._known[key] = tuple(timestep_of(one, model_sampling, flows) for one in levels) or None
        return self._known[key]

    def _levels_in(self, options: dict[str, Any]) -> list[float]:
        """Of all steps, from the list that came to the sampler past all other wrappers; empty if it is not followed."""
        listed, heard = options.get("sample_sigmas", self._sigmas), self.heard
        if heard.follows and not heard.times and torch.is_tensor(listed):
            self._sigmas, heard.times = listed, listed.tolist()[:-1]
        heard.follows = heard.follows and listed is self._sigmas and bool(heard.times)
        return heard.times if heard.follows else []


def is_left_out(options: dict[str, Any]) -> bool:
    """Has EasyCache answered the call of the model with these transformer_options in the model's place?"""
    cache = options.get("easycache")  # LazyCache's has this place too, but answers before the model is called
    return getattr(cache, "name", "") == "EasyCache" and getattr(cache, "skip_current_step", False)


def is_flow(model_sampling: Any) -> bool:
    """Does it sample a flow model, whose levels are shares of pure noise, from 0 to 1?"""
    return hosting.is_kind(model_sampling, "CONST")


def timestep_of(sigma: float, model_sampling: Any, flows: bool) -> float:
    """Of a noise level, on Stable Diffusion's schedule. flows: a flow model's is the share of the noise, of 1000."""
    if not is_flow(model_sampling):  # EDM models see the picture at another deviation than 1
        relative = sigma / getattr(model_sampling, "sigma_data", 1.0)
    elif flows:  # relative to the picture, half of a film's steps would all be the noisiest there is
        return 1000.0 * sigma
    else:  # of the picture it sees 1 - sigma, under sigma of the noise
        noise = sigma * getattr(model_sampling, "noise_scale", 1.0)
        relative = noise / max(1.0 - sigma, noise / _PURE_NOISE) if noise > 0 else 0.0
    return hosting.STABLE_DIFFUSION.timestep_of_sigma(relative)
