"""The part of a patch that measures its gain, and decides by it whether merging pays."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn

from ..engine.decision import decide
from ..engine.state import State
from ..models.unet_blocks import BlockPlace, is_compiled
from ..models.wrap import wraps_on
from ..reporting.gains import KNOWN, PIXELS, Gain, nearest
from ..settings.schedule import choose
from .measure import CallUNet, call_of, device_and_dtype_of, noise_for, time_calls, why_not_now
from .pays import Pays, about, device_of, dtype_of, widths_of


class Measured(State):
    """A state that can measure its gain, the speed of merged calls relative to unmerged ones; the base of `Patch`.

    The subclass sets `adapter`, which finds the blocks: a `UNetAdapter` or `TransformerAdapter`. `model` is None if it
    was garbage-collected. `patched_object` refers weakly to what `patch` got; it is None if that allows no such
    reference.
    """

    adapter: Any
    model: nn.Module | None
    patched_object: weakref.ref[Any] | None = None

    def measure(self, height: int = 512, width: int = 512, batch: int = 2, *, steps: int = 20, rounds: int = 3,
                call: CallUNet | None = None) -> Gain:  # fmt: skip
        """Time unmerged and merged calls of the UNet with random inputs, and remember the gain.

        Rules with `only_if_it_pays` follow the gain from now on (`tome_core.gains`, also for its file). The timed calls
        merge at every level with enough tokens, and at the finest in any case. No random generator and no count of this
        patch changes. The patch need not be on the model; what was on it is put back.

        Args:
            height: height of a picture, in pixels.
            width: width of a picture, in pixels.
            batch: number of samples in a call; 2 for one picture with guidance.
            steps: number of a picture's steps; the gain's merged time is the mean over all, also unmerged ones.
            rounds: how often each kind of call is timed; the median counts.
            call: calls the UNet with latents ``[B, C, H, W]`` and timesteps ``[B]``, if it takes other inputs than a
                prompt.

        Raises:
            RuntimeError: a sampling is in progress, or the model is compiled, wrapped by another program, gone, or a
                transformer.
            ValueError: a size is impossible, nothing would merge, or the UNet needs other inputs.
        """
        unet = self.model
        if unet is None:
            raise RuntimeError("the model that this handle patched is gone; patch the new one")
        if not self._places:
            raise RuntimeError("only UNets can be measured; this is a transformer")
        wraps = wraps_on(unet)
        is_called = self.time.is_sampling or (wraps is not None and wraps.is_busy())
        problem = why_not_now(unet, self._places, is_called, self.patched_object and self.patched_object())
        if problem:
            raise RuntimeError(problem)
        for name, value, least in (("height", height, PIXELS), ("width", width, PIXELS), ("batch", batch, 1),
                                   ("steps", steps, 1), ("rounds", rounds, 1)):  # fmt: skip
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name}={value!r} is not possible; use a whole number from {least} up")
        device, dtype = device_and_dtype_of(unet)
        x = noise_for(unet, batch, height // PIXELS, width // PIXELS).to(device, dtype)
        call = call or call_of(unet, self._places[0], x)
        trial, in_force = type(self)([unet], self.config, self.clock.schedule), wraps and wraps.patch
        try:
            trial.install()
            trial.pays = Pays((), (), always=True)
            with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.no_grad():
                seconds = time_calls(trial, call, x, steps, rounds)
            report = trial.report()
        finally:
            trial.remove()
            if in_force is not None:
                in_force.install()
        if not report.merged_anything:
            raise ValueError(f"nothing merges at {width}x{height}, so there is nothing to measure\n{report}")
        gain = Gain(*self._about(), device_of(device), dtype_of(dtype), *x.shape[-2:], batch, *seconds)
        KNOWN.remember(gain)
        self.ask_whether_it_pays()
        return gain

    def gain_for(self, height: int, width: int, batch: int = 2) -> Gain | None:
        """Return the gain measured for a size in pixels and the nearest batch; None without one.

        It was measured for equal model, settings, device and dtype. `batch` is samples in a call.
        """
        if not KNOWN or not self._places:
            return None
        device, dtype = device_and_dtype_of(self.model)
        where = device_of(device), dtype_of(dtype)
        return nearest(KNOWN.of(self._about()), *where, height // PIXELS, width // PIXELS, batch)

    def why_not(self, height: int, width: int, batch: int = 2) -> str:
        """Return the first reason why pictures of a size in pixels would not merge, without calling the model.

        It is "" if a rule would merge at some level and time, and for every transformer. `batch` is samples in a call.
        """
        if not self._places:
            return ""
        if self.pays is None:
            self.ask_whether_it_pays()
        device, dtype = device_and_dtype_of(self.model)
        latent = torch.empty(batch, 1, height // PIXELS, width // PIXELS, device=device, dtype=dtype)
        reasons, downsamples = [], self.clock.downsamples
        for rule in self.clock.rules:
            rules = choose((rule,), downsamples)
            gates = (None,) * len(rules) if self.pays is None else self.pays.gates(rules, latent)
            for level_rules, gate, factor in zip(rules, gates, downsamples, strict=True):
                tokens = -(-latent.shape[2] // factor) * -(-latent.shape[3] // factor)
                reasons.append(decide(level_rules, "no rule holds for this size", tokens, device.type, gate)[1])
        return reasons[0] if all(reasons) else ""

    def ask_whether_it_pays(self) -> None:
        """Set `pays` by the gains known now; to None for a compiled UNet, a transformer, or if nothing asks for it.

        A rule with `only_if_it_pays` asks for it; so does any known gain, of whatever model.
        """
        self.pays = None
        asks = any(rule.only_if_it_pays for rule in self.clock.rules)
        if self._places and (asks or KNOWN) and not is_compiled(self.model, self._places):
            # launches do not limit a compiled model
            blocks = [(2**place.halvings, widths_of(place.block)[0]) for place in self._places]
            self.pays = Pays(KNOWN.of(self._about()) if KNOWN else (), blocks)

    @property
    def _places(self) -> list[BlockPlace]:
        """The transformer blocks of the UNet; empty for diffusers' transformers, and if the model is gone."""
        return [] if self.model is None else getattr(self.adapter, "places", [])

    def _about(self) -> tuple[str, ...]:
        """Return the first five fields of this patch's gains, from `model` to `tome_core`, by which they are found."""
        return about(self.model, self._places, self.config)
