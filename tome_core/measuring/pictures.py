"""The gain in the user's own pictures: steps are timed as they happen. The times are reported, and decide nothing.

A GPU runs behind its host by at most the length of its queue, so the time from a sampling's first reported step to its
last is divided by the model calls between them. Only equal conditions are compared: model, size, sampler, number of
calls, and what the host adds.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..attention.descriptions import full_name
from ..models.intercept import attention_names_in
from ..reporting.gains import KNOWN, PIXELS
from ..settings.config import MergeConfig
from .pays import device_of, digest, version

_CALLS = 6  # the fewest timed calls: of fewer, the GPU's queue would be too large a part


class Steps:
    """The steps of one sampling, as its sampler reports them.

    Use `begin` when the sampler's loop begins, `call` at each call of the model, `count_step` or the callback of
    `counting_callback` after each step, and `remember` at the end. `follows` says if the sampler calls the model at the
    times of `begin` and reports each step in order: `begin` sets it to True, a step out of order to False; before
    `begin` it has the constructor's value.

    `times` has the times of all steps in the host's terms, such as sigmas; it is empty if they are not known. `calls`
    is the number of model calls so far, `done` that of the steps since `begin`.
    """

    clock = staticmethod(time.perf_counter)

    def __init__(self, follows: bool = True) -> None:
        self.begin([])
        self.follows = follows
        self.calls, self._kinds = 0, set()

    def begin(self, times: list[Any]) -> None:
        """Begin a sampler's loop over these times; of earlier loops only what `call` noted stays."""
        self.times, self.done, self.follows = times, 0, True
        self._reports: list[tuple[float, int]] = []  # (time, number of calls) of the first and the last report

    def call(self, latent: Any = None, *more: Any) -> None:
        """Count a call; note (shape, dtype, device, *more), hashable, of latents ``[B, C, (frames,) H, W]`` if any."""
        self.calls += 1
        if torch.is_tensor(latent):
            self._kinds.add((tuple(latent.shape), latent.dtype, latent.device, *more))

    def count_step(self, step: Any) -> None:
        """Count any step; keep the first and latest time. `follows` stays True only for ints 0, 1, 2 and so on."""
        self.follows = self.follows and type(step) is int and step == self.done
        self.done += 1
        self._reports[1:] = [(self.clock(), self.calls)]

    def counting_callback(self, callback: Callable | None, number_in: Callable = lambda step: step) -> Callable:
        """Return a sampler's callback that counts steps and calls the host's, if any; its ``steps`` is this object.

        `number_in` takes the first argument of the callback and returns what `count_step` takes.
        """

        def counting(step: Any, *args: Any, **kwargs: Any) -> Any:
            self.count_step(number_in(step))
            return None if callback is None else callback(step, *args, **kwargs)

        counting.steps = self
        return counting

    @property
    def time(self) -> Any | None:
        """The entry of `times` for the calls until the next report, at the end the last; None if not known.

        It is not known if `times` is empty or `follows` is False.
        """
        return self.times[min(self.done, len(self.times) - 1)] if self.follows and self.times else None

    def remember(self, model: nn.Module | None, config: MergeConfig | None, report: Any, *beside: Any) -> str:
        """Keep a normally ended sampling's seconds per call; return the text of `KNOWN.of_pictures`, "" if unknown.

        `model` is the model as it is without a patch; None if that is not known. `config` and the patch's `report` are
        None for an unmerged picture: its time is kept, the result is "". `beside` has further conditions on which the
        time depends. Nothing is kept, and the result is "", if `model` is None, or fewer than 6 calls lay between the
        first and the last reported step, or none had latents, or there is a `config` and nothing merged.
        """
        (start, before), (end, after) = (*self._reports, (0.0, 0), (0.0, 0))[:2]
        did_not = config is not None and (report is None or not report.merged_anything)
        if model is None or after - before < _CALLS or not self._kinds or did_not:
            return ""
        kinds = sorted(str((shape, dtype, device_of(device), more)) for shape, dtype, device, *more in self._kinds)
        sides = sorted({shape[-2:] for shape, *_ in self._kinds})
        where, how = _where(model, sides), digest(kinds, self.calls, self.done, beside)
        # next to another patch, the same rules may save another share
        rules = (_rules(config), f"{report.work_saved or 0:.2f}") if config else ("", "")
        KNOWN.add_picture((where, how, *rules), (end - start) / (after - before))
        return KNOWN.of_pictures(where, *rules) if config else ""


def known_gain(model: nn.Module, config: MergeConfig, height: int, width: int) -> str:
    """Return the gain in the user's own pictures of a size in pixels as text, by the times that `Steps` remembered.

    `model` is the model as it is without a patch; it is not called. Of all conditions, such as samplers, those of the
    latest such picture count. The text is like ``about 1.5x faster, from your own pictures (...)``; "" if too few
    pictures are known, or if their times vary too much.
    """
    return KNOWN.of_pictures(_where(model, [(height // PIXELS, width // PIXELS)]), _rules(config))


def _where(model: nn.Module, sides: list[tuple[int, int]]) -> str:
    """Return a hash of the model's code, sizes by dtype, versions, the command line's arguments, and `sides`.

    Code: the names of the modules' forward functions, of attention in these, and of processors. Sizes: of all weights.
    `sides` are the different (height, width) of the latents, in cells, sorted.
    """
    parts: Counter[str] = Counter()
    for module in model.modules():
        code, processor = vars(module).get("forward", type(module).forward), type(vars(module).get("processor"))
        parts[f"{full_name(code)} {attention_names_in(code)} {processor.__name__}"] += 1
    for parameter in model.parameters():
        parts[str(parameter.dtype)] += parameter.numel()
    return digest(sorted(parts.items()), sides, torch.__version__, version(), sys.argv[1:])


def _rules(config: MergeConfig) -> str:
    """Return a hash of the settings without the seed."""
    return digest(replace(config, seed=0))
