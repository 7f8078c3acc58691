"""One case measured: every variant takes its turn in every round, so that what disturbs one disturbs all."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.speed_fleet import Fleet
from benchmarks.speed_memory import cuda_peak, free_memory, kernels, operators, process_peak, reason
from benchmarks.speed_models import Shape, make_inputs, pictures_in
from benchmarks.speed_picture import picture_run
from benchmarks.speed_plan import Case
from benchmarks.speed_variants import VARIANTS

_ENOUGH_SECONDS, _MOST_CALLS = 0.1, 20  # a GPU's quick calls are repeated for so long within a round, so often at most
_SMALL_PIXELS = 128  # of the call before that whose memory is measured


class Bench:
    """The variants of one case, ready to run. `costs` or `warm_up` comes before the first `round`."""

    def __init__(
        self, case: Case, shape: Shape, fleet: Fleet, decoder: nn.Module | None = None,
        failed: dict[str, str] | None = None,
    ) -> None:  # fmt: skip
        """decoder: for pictures. failed: variants that are known to fail, and why; they are not tried again."""
        self.case, self._shape, self._fleet = case, shape, fleet
        self.names = [name for name in fleet.unets if case.what == "call" or not VARIANTS[name].calls_only]
        self.failed = dict(failed or {})
        weight = next(fleet.unpatched.parameters())
        self.device, self._dtype = weight.device, weight.dtype
        self._calls = dict.fromkeys(self.names, 1)
        self._runs = {name: self._prepared(fleet.unets[name], decoder) for name in self.names}

    def _prepared(self, unet: nn.Module, decoder: nn.Module | None) -> Callable[[], Any]:
        if self.case.what == "call":
            return self._call(unet, self.case.pixels, self.case.batch)
        return picture_run(self.case, self._shape, self._fleet.unpatched, unet, decoder)

    def _call(self, unet: nn.Module, pixels: int, batch: int) -> Callable[[], Any]:
        positional, named = make_inputs(self._shape, pixels, batch, str(self.device), self._dtype)
        begin = getattr(unet, "begin_picture", None)
        if begin is None:
            return lambda: unet(*positional, **named)
        pictures = pictures_in(batch)
        return lambda: (begin(pictures), unet(*positional, **named))[1]

    def warm_up(self) -> None:
        """Run every variant once, unmeasured; on a GPU, find out how often it has to be called for a steady time."""
        self._each(lambda name: self._runs[name]() is None)
        if self.device.type == "cuda":
            once = self._each(lambda name: seconds(self._runs[name], self.device))
            self._calls |= {name: max(1, min(_MOST_CALLS, int(_ENOUGH_SECONDS / t))) for name, t in once.items()}

    def costs(self) -> dict[str, Any]:
        """A row: the work of one run (kernels launched on a GPU, else operators), and its peak memory beyond the model.

        Counts as the warm-up. The memory of a CPU's pictures is left out: the decoder's is all there would be to see.
        """
        row: dict[str, Any] = {"case": self.case.as_json()}
        if self.device.type == "cuda":
            self.warm_up()
            row["peak_mib"] = self._each(lambda name: cuda_peak(self._runs[name]))
            row["kernels"] = self._each(lambda name: kernels(self._runs[name]))
        elif self.case.compiled:  # one fused loop may be any number of operators
            self.warm_up()
        else:
            if self.case.what == "call":
                row["peak_mib"] = self._each(self._process_peak)
            row["operators"] = self._each(lambda name: operators(self._runs[name]))
        return {**row, "failed": dict(self.failed)}

    def _process_peak(self, name: str) -> float | None:
        small = self._call(self._fleet.unets[name], _SMALL_PIXELS * self._shape.shrink, 2)
        return process_peak(self._runs[name], small)

    def round(self, number: int) -> dict[str, Any]:
        """A row: seconds of each variant, which take turns; the one that begins is another in every round."""
        begin = number % len(self.names)
        times: dict[str, float] = {}
        blocks: dict[str, float] = {}
        for name in self.names[begin:] + self.names[:begin]:
            clock = self._fleet.clocks.get(name)
            if clock:
                clock.seconds = 0.0
            spent = self._attempt(name, lambda name=name: seconds(self._runs[name], self.device, self._calls[name]))
            if spent is not None:
                times[name] = spent
                if clock and self.case.what == "call":
                    blocks[name] = clock.seconds
        row = {"case": self.case.as_json(), "round": number, "seconds": times}
        return {**row, **({"block_seconds": blocks} if blocks else {}), "failed": dict(self.failed)}

    def _each(self, measure: Callable[[str], Any]) -> dict[str, Any]:
        values = {name: self._attempt(name, lambda name=name: measure(name)) for name in self.names}
        return {name: value for name, value in values.items() if value is not None}

    def _attempt(self, name: str, action: Callable[[], Any]) -> Any:
        """The action's value; None where the variant has failed, now or before. Running out of memory is a result."""
        if name in self.failed:
            return None
        try:
            return action()
        except Exception as error:
            self.failed[name] = reason(error)
        # outside the handler, whose traceback keeps the tensors of the failed call alive
        free_memory(self.device)
        return None


def seconds(run: Callable[[], Any], device: torch.device, calls: int = 1) -> float:
    """Mean seconds of a call: processor time on a CPU, which other programs do not lengthen; events on a GPU."""
    if device.type != "cuda":
        start = time.process_time()
        for _ in range(calls):
            run()
        return (time.process_time() - start) / calls
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    for _ in range(calls):
        run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / calls
