"""The gain in the user's own pictures: steps are timed as they happen. The times are reported, and decide nothing.

A GPU runs behind its host by at most the length of its queue. So the time from a sampling's first reported step to its
last is divided by the number of model calls between them. Loading and compiling come before the first step. Only equal
conditions are compared: the same model, size, sampler, number of calls, and further conditions from the host.
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
    `counting_callback` after each step, and `remember` at the end.

    Args:
        follows: True if the sampler calls the model at the times of `begin`, and reports each step in order. `begin`
            sets it to True, and a step out of order to False.

    Attributes:
        times: the times of all steps, in the host's terms, such as sigmas; empty if they are not known.
        calls: number of model calls so far.
        done: number of steps reported since `begin`.
    """

    clock = staticmethod(time.perf_counter)

    def __init__(self, follows: bool = True) -> None:
        self.begin([])
        self.follows = follows
        self.calls, self._kinds = 0, set()

    def begin(self, times: list[Any]) -> None:
        """Begin the sampler's loop over these times: no step of it is done. A sampler may begin more than one loop.

        The noted times of earlier loops are dropped; `calls` goes on.
        """
        self.times, self.done, self.follows = times, 0, True
        self._reports: list[tuple[float, int]] = []  # (time, number of calls) of the first and the last report

    def call(self, latent: Any = None, *more: Any) -> None:
        """Count a call of the model. `remember` compares only samplings whose calls had equal arguments.

        Args:
            latent: the call's latents ``[B, C, (frames,) H, W]``, of which shape, dtype and device are noted.
            more: further conditions on which the call's time depends. Ignored if `latent` is no tensor.
        """
        self.calls += 1
        if torch.is_tensor(latent):
            self._kinds.add((tuple(latent.shape), latent.dtype, latent.device, *more))

    def count_step(self, step: Any) -> None:
        """Count a finished step, and note the time.

        Args:
            step: what the sampler reports. `follows` stays True only while this is 0, 1, 2 and so on.
        """
        self.follows = self.follows and type(step) is int and step == self.done
        self.done += 1
        self._reports[1:] = [(self.clock(), self.calls)]

    def counting_callback(self, callback: Callable | None, number_in: Callable = lambda step: step) -> Callable:
        """Return a callback for a sampler that counts steps and then returns what the given callback returns.

        The attribute ``steps`` of the result is this object.

        Args:
            callback: the host's callback for the sampler; None: steps are only counted.
            number_in: takes the first argument of the callback and returns what `count_step` takes.
        """

        def counting(step: Any, *args: Any, **kwargs: Any) -> Any:
            self.count_step(number_in(step))
            return None if callback is None else callback(step, *args, **kwargs)

        counting.steps = self
        return counting

    @property
    def time(self) -> Any | None:
        """The entry of `times` for the calls until the next report; after all steps, the last.

        None if `follows` is False or `times` is empty.
        """
        return self.times[min(self.done, len(self.times) - 1)] if self.follows and self.times else None

    def remember(self, model: nn.Module | None, config: MergeConfig | None, report: Any, *beside: Any) -> str:
        """Keep the time of a sampling that has ended normally, and return the known gain of such pictures.

        The time is in seconds per model call, see `Gains.pictures`. Nothing is kept if fewer than 6 calls lay between
        the first and the last report or none had latents, or if `config` is given and nothing merged; the result is ""
        then.

        Args:
            model: the called model, without a patch; None if it is not known, then nothing is kept.
            config: the settings; None for an unmerged picture.
            report: the `Report` on the picture; None for an unmerged picture.
            beside: further conditions on which the time depends.

        Returns:
            The gain as text, see `known_gain`; "" for an unmerged picture, or if too few pictures are known.
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
    """Return the gain for pictures of a size as text, from the user's own pictures, without calling the model.

    Of all sets of conditions, such as samplers, the one of the latest such picture counts. The model is without a
    patch. Sizes are in pixels.

    Returns:
        The text, such as ``about 1.5x faster, from your own pictures (...)``; "" if too few pictures are known.
    """
    return KNOWN.of_pictures(_where(model, [(height // PIXELS, width // PIXELS)]), _rules(config))


def _where(model: nn.Module, sides: list[tuple[int, int]]) -> str:
    """Return a hash of the model's parts, the latents' sides (height, width), versions, and the command line."""
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
