"""One sampling: the noise levels of its steps, and the level of each model call, without waiting for the device."""

from typing import Any

import torch

from .host import hosting

# modules whose samplers call the model at the levels of their list, in order, and report each step's first call
_KNOWN = ("comfy.k_diffusion.sampling", "comfy.extra_samplers.uni_pc", "comfy_extras.nodes_advanced_samplers")
_OF_THEIR_OWN = ("sample_dpm_fast", "sample_dpm_adaptive", "sample_ar_video")  # samplers that choose their own levels
_PURE_NOISE = 1e6  # sigma relative to the picture, in place of infinity at pure noise


class HostSampling:
    """The steps of one ComfyUI sampling, and the noise level of each model call.

    `sampler`, `sigmas` and `noise` are those of ComfyUI's ``outer_sample``; outside a sampling there are none. The
    levels of all steps are read once, at the first call. A known sampler reports its steps to the callback that the
    caller makes by ``timed_steps.counting_callback`` and passes to ComfyUI; this gives the level of each call. The
    middle calls of a second-order sampler count as the step's end. With any other sampler, each call reads its level,
    which waits for the device. In the methods, `options` are a call's transformer_options, `t` its sigmas.
    """

    def __init__(self, sampler: Any = None, sigmas: Any = None, noise: Any = None) -> None:
        # `stopped` is set by the caller, after an exception; `sampler` is the name of the sampler's function
        # no noise: the sampling continues another one's picture. ComfyUI makes noise on the CPU
        self._continues = torch.is_tensor(noise) and noise.device.type == "cpu" and not noise.any()
        self._pictures, self.stopped = len(noise) if torch.is_tensor(noise) else None, False
        self._sigmas, self._planned = sigmas, max(0, len(sigmas) - 1) if hasattr(sigmas, "__len__") else 0
        function = getattr(sampler, "sampler_function", None)
        follows = getattr(function, "__module__", "") in _KNOWN and function.__name__ not in _OF_THEIR_OWN
        self.timed_steps, self.sampler = hosting.Steps(follows), getattr(function, "__qualname__", "")
        self._known: dict[tuple, Any] = {}  # results from the model's schedule, which may wait for the device
        self._computed: set[int] = set()  # steps that EasyCache or LazyCache did not skip

    @property
    def steps(self) -> dict[str, int]:
        """Numbers of steps: "steps" done, "steps_planned" (0: unknown), "steps_computed" (EasyCache skips others)."""
        return {"steps": self.timed_steps.done, "steps_planned": self._planned, "steps_computed": len(self._computed)}

    @property
    def text(self) -> str:
        """Planned ``20 steps``; ``12 of 20 steps`` if `stopped`; ``20 steps, 13 of them computed``; "" if unknown."""
        done, planned, computed = self.steps.values()
        count = hosting.count(planned, "step")
        if self.stopped and done < planned:
            return f"{done} of {count}"
        is_part = done == planned and 0 < computed < planned
        return f"{count}, {computed} of them computed" if is_part else count if planned else ""

    def note_call(self, options: dict[str, Any]) -> None:
        """Count the current step as computed, at most once, unless EasyCache skipped the model in this call."""
        if not is_left_out(options):
            self._computed.add(self.timed_steps.done)

    def sigma(self, t: Any, options: dict[str, Any]) -> float:
        """Return a call's sigma: from the sampler's list if known, else the first of `t`, waiting for its device."""
        if torch.is_tensor(t) and t.device.type != "cpu" and self._levels_in(options):
            return self.timed_steps.time
        return float(t.reshape(-1)[0]) if torch.is_tensor(t) else float(t)

    def pictures_in(self, x: Any, options: dict[str, Any]) -> int | None:
        """Return how many pictures are made; None if not known, or if latents `x` lack some for a condition."""
        conditions = options.get("cond_or_uncond")
        whole = conditions is not None and torch.is_tensor(x) and self._pictures is not None
        return self._pictures if whole and len(x) == len(conditions) * self._pictures else None

    def is_between(self, start: float, end: float, sigma: float, model_sampling: Any) -> bool:
        """Tell if a noise level is between the levels of two shares (0..1) of the schedule, both included."""
        key = id(model_sampling), start, end
        if key not in self._known:
            self._known[key] = [model_sampling.percent_to_sigma(percent) for percent in (start, end)]
        first, last = self._known[key]
        return last <= sigma <= first

    def timesteps(self, model_sampling: Any, options: dict, flow_timesteps: bool = False) -> tuple[float, ...] | None:
        """Return all steps' timesteps, see `timestep_of`; None if unknown, or if another sampling began the picture."""
        key = id(model_sampling), flow_timesteps
        if key not in self._known:
            levels = [] if self._continues else self._levels_in(options)
            self._known[key] = tuple(timestep_of(level, model_sampling, flow_timesteps) for level in levels) or None
        return self._known[key]

    def _levels_in(self, options: dict[str, Any]) -> list[float]:
        """Return each step's noise level, read once; [] if the sampler or list is unknown, or once the list changed."""
        listed, heard = options.get("sample_sigmas", self._sigmas), self.timed_steps
        if heard.follows and not heard.times and torch.is_tensor(listed):
            self._sigmas, heard.times = listed, listed.tolist()[:-1]
        heard.follows = heard.follows and listed is self._sigmas and bool(heard.times)
        return heard.times if heard.follows else []


def is_left_out(options: dict[str, Any]) -> bool:
    """Tell whether ComfyUI's EasyCache skipped the model in the call with these transformer_options."""
    cache = options.get("easycache")  # LazyCache uses this key too, but skips before the model is called
    return getattr(cache, "name", "") == "EasyCache" and getattr(cache, "skip_current_step", False)


def is_flow(model_sampling: Any) -> bool:
    """Tell whether ``model_sampling`` is a ``CONST``, of a flow model, whose noise levels are shares of noise."""
    return hosting.is_kind(model_sampling, "CONST")


def timestep_of(sigma: float, model_sampling: Any, flow_timesteps: bool) -> float:
    """Return the timestep of Stable Diffusion's schedule, not of the model's, with as much noise to picture as `sigma`.

    A flow model's sigma is the share of noise; with `flow_timesteps` its timestep is 1000 times that share instead.
    """
    if not is_flow(model_sampling):  # EDM models scale the picture to another standard deviation than 1
        relative = sigma / getattr(model_sampling, "sigma_data", 1.0)
    elif flow_timesteps:  # by log-SNR, half of a video's steps would have the highest timestep
        return 1000.0 * sigma
    else:  # x = sigma * noise + (1 - sigma) * picture
        noise = sigma * getattr(model_sampling, "noise_scale", 1.0)
        relative = noise / max(1.0 - sigma, noise / _PURE_NOISE) if noise > 0 else 0.0
    return hosting.STABLE_DIFFUSION.timestep_of_sigma(relative)
