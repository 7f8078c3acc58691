"""The steps of one sampling in a host's own terms: their times, the model calls, and when each was reported."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from ..faults import quietly


class Steps:
    """The steps of one sampling, as its sampler reports them.

    Use `begin` when the sampler's loop begins, `call` at each call of the model, and `count_step` or the callback of
    `counting_callback` after each step. `follows` says if the sampler calls the model at the times of `begin` and
    reports each step in order: `begin` sets it to True, a step out of order to False; before `begin` it has the
    constructor's value.

    `times` has the times of all steps in the host's terms, such as sigmas; it is empty if they are not known. `calls`
    is the number of model calls so far, `done` that of the steps since `begin`. `kinds` are the different kinds of
    calls, see `call`.
    """

    clock = staticmethod(time.perf_counter)

    def __init__(self, follows: bool = True) -> None:
        self.begin([])
        self.follows = follows
        self.calls = 0
        self.kinds: set[tuple] = set()

    def begin(self, times: list[Any]) -> None:
        """Begin a sampler's loop over these times, in the host's terms; `calls` and `kinds` of earlier loops stay."""
        self.times, self.done, self.follows = times, 0, True
        self._reports: list[tuple[float, int]] = []  # (time, number of calls) of the first and the last report

    def call(self, latent: Any = None, *more: Any) -> None:
        """Count a call; note (shape, dtype, device, *more), hashable, of latents ``[B, C, (frames,) H, W]`` if any."""
        self.calls += 1
        if torch.is_tensor(latent):
            self.kinds.add((tuple(latent.shape), latent.dtype, latent.device, *more))

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
            quietly(lambda: self.count_step(number_in(step)))
            return None if callback is None else callback(step, *args, **kwargs)

        counting.steps = self
        return counting

    @property
    def time(self) -> Any | None:
        """The entry of `times` for the calls until the next report, at the end the last; None if not known."""
        return self.times[min(self.done, len(self.times) - 1)] if self.follows and self.times else None

    @property
    def timed(self) -> tuple[float, int]:
        """The seconds and the model calls between the first and the last reported step; zeros before the second."""
        if len(self._reports) < 2:
            return 0.0, 0
        (start, before), (end, after) = self._reports
        return end - start, after - before
