"""What merging gains in people's own pictures: steps are timed as they pass, and nobody waits, asks or goes by it.

A device runs behind its host, but by no more than its queue holds. So of a sampling that ended as it should counts the
time from its first reported step to its last, for each call of the model. What loads and compiles lies before it.
Only like is compared with like: the same model, size, sampler, number of calls, and all else that hosts tell.
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

from ..attention.by_hand import full_name
from ..models.intercept import names_known_to
from ..reporting.gains import KNOWN, PIXELS
from ..settings.config import MergeConfig
from .pays import device_of, digest, version

_CALLS = 6  # timed: of fewer, what the device is behind by would be too large a part


class Steps:
    """The steps of one sampling, as its sampler reports them. times: of all, in the host's own terms, if it knows them.

    follows: does the sampler call the model at these times, and report one after another?
    """

    clock = staticmethod(time.perf_counter)

    def __init__(self, follows: bool = True) -> None:
        self.begin([])
        self.follows = follows
        self.calls, self._kinds = 0, set()  # of the model

    def begin(self, times: list[Any]) -> None:
        """The sampler's function is called, maybe once more, to call the model at these times."""
        self.times, self.done, self.follows = times, 0, True
        self._reports: list[tuple[float, int]] = []  # the first and the last: when, after how many calls

    def call(self, latent: Any = None, *more: Any) -> None:
        """The model is called. latent: ``[B, C, (frames,) H, W]``; more: what else decides how long it takes."""
        self.calls += 1
        if torch.is_tensor(latent):
            self._kinds.add((tuple(latent.shape), latent.dtype, latent.device, *more))

    def hear(self, step: Any) -> None:
        """A step is done."""
        self.follows = self.follows and type(step) is int and step == self.done
        self.done += 1
        self._reports[1:] = [(self.clock(), self.calls)]

    def listening(self, callback: Callable | None, number_in: Callable = lambda told: told) -> Callable:
        """A sampler's callback, with us listening. number_in: finds a step's number in what is told first."""

        def heard(told: Any, *args: Any, **kwargs: Any) -> Any:
            self.hear(number_in(told))
            return None if callback is None else callback(told, *args, **kwargs)

        heard.steps = self
        return heard

    @property
    def time(self) -> Any | None:
        """Of the calls until the next report, the last one's behind all of them; None where it is not known."""
        return self.times[min(self.done, len(self.times) - 1)] if self.follows and self.times else None

    def remember(self, model: nn.Module | None, config: MergeConfig | None, report: Any, *beside: Any) -> str:
        """The sampling has ended as it should: keep its time, and say what is known of its like, "" if too little.

        model: as it was called, without a patch. config: by which it was to merge; report: on what did, None where
        nothing was to. beside: what else decides how long a call takes.
        """
        (start, before), (end, after) = (*self._reports, (0.0, 0), (0.0, 0))[:2]
        did_not = config is not None and (report is None or not report.merged_anything)
        if model is None or after - before < _CALLS or not self._kinds or did_not:
            return ""
        kinds = sorted(str((shape, dtype, device_of(device), more)) for shape, dtype, device, *more in self._kinds)
        sides = sorted({shape[-2:] for shape, *_ in self._kinds})
        where, how = _where(model, sides), digest(kinds, self.calls, self.done, beside)
        # the same rules may leave out another share, beside something else
        rules = (_rules(config), f"{report.work_saved or 0:.2f}") if config else ("", "")
        KNOWN.add_picture((where, how, *rules), (end - start) / (after - before))
        return KNOWN.told(where, *rules) if config else ""


def told(model: nn.Module, config: MergeConfig, height: int, width: int) -> str:
    """What is known of pictures of this size that are drawn as the latest was; "" if too little. In pixels."""
    return KNOWN.told(_where(model, [(height // PIXELS, width // PIXELS)]), _rules(config))


def _where(model: nn.Module, sides: list[tuple[int, int]]) -> str:
    """A model with all that stands in it, the sides of its latents, and how this process was started."""
    parts: Counter[str] = Counter()
    for one in model.modules():
        code, processor = vars(one).get("forward", type(one).forward), type(vars(one).get("processor"))
        parts[f"{full_name(code)} {names_known_to(code)} {processor.__name__}"] += 1
    for one in model.parameters():
        parts[str(one.dtype)] += one.numel()
    return digest(sorted(parts.items()), sides, torch.__version__, version(), sys.argv[1:])


def _rules(config: MergeConfig) -> str:
    return digest(replace(config, seed=0))
