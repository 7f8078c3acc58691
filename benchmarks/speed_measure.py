"""One case measured: every variant takes its turn in every round, so that what disturbs one disturbs all.

And the device at its best, products and copies, which a roofline is computed from.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from diffusers.models.attention_processor import AttnProcessor
from torch import nn

from benchmarks import speed_costs
from benchmarks.networks import finest_blocks
from benchmarks.speed_costs import Rates, Roofline
from benchmarks.speed_models import Shape, make_inputs, twin
from benchmarks.speed_plan import CALL, UNetCase, picture_run
from benchmarks.speed_variants import VARIANTS, pick_for
from tome_core.measuring.measure import pictures_in

_ENOUGH_SECONDS, _MOST_CALLS = 0.1, 20  # a GPU's quick calls are repeated for so long within a round, so often at most
_SMALL_PIXELS = 128  # of the call before that whose memory is measured
_SIDES = {"cpu": (512, 1024), "cuda": (4096, 8192)}  # of square products, of which the best counts
_COPIED = {"cpu": 2**28, "cuda": 2**30}  # bytes, more than any cache holds
_TIMES = 5


class BlockClock:
    """Processor seconds inside the blocks of the finest level.

    On a CPU the rest of a UNet call, three quarters of it, varies by more than merging gains; the blocks alone tell.
    """

    def __init__(self, unet: nn.Module) -> None:
        self.seconds = self._since = 0.0
        for place in finest_blocks(unet):
            place.block.register_forward_pre_hook(self._start)
            place.block.register_forward_hook(self._stop)

    def _start(self, *_: Any) -> None:
        self._since = time.process_time()

    def _stop(self, *_: Any) -> None:
        self.seconds += time.process_time() - self._since


class Fleet:
    """A model and a patched twin of it for each variant.

    unpatched: the model itself. unets: by variant. clocks: variant -> `BlockClock`, where processor time is what is
    measured and the model is not compiled (hooks would break its graph).
    """

    def __init__(self, unet: nn.Module, names: Sequence[str], attention: str = "sdpa", compiled: bool = False) -> None:
        """unet: is left as it is. attention: ``sdpa`` or ``naive``."""
        self.unpatched = twin(unet)
        if attention == "naive":
            self.unpatched.set_attn_processor(AttnProcessor())  # writes all its scores to memory
        self.unets = {name: twin(self.unpatched) for name in names}
        for name, one in self.unets.items():
            VARIANTS[name].apply(one)
        on_cpu = next(unet.parameters()).device.type == "cpu"
        self.clocks = {} if compiled or not on_cpu else {name: BlockClock(one) for name, one in self.unets.items()}
        if compiled:
            self._compile()

    def _compile(self) -> None:
        # each variant at each size is a graph of its own for the same lines of code; the compiler gives up after eight
        torch._dynamo.config.recompile_limit = 256
        self.unpatched = torch.compile(self.unpatched, dynamic=False)
        self.unets = {name: torch.compile(one, dynamic=False) for name, one in self.unets.items()}


class SpeedBench:
    """The variants of one case, ready to run. `costs` or `warm_up` comes before the first `round`."""

    def __init__(
        self, case: UNetCase, shape: Shape, fleet: Fleet, rates: Rates, decoder: nn.Module | None = None,
        failed: dict[str, str] | None = None,
    ) -> None:  # fmt: skip
        """rates: of the device, for bounds. decoder: for pictures. failed: variants that are known to fail, and why;
        they are not tried again.
        """
        self.case, self._shape, self._fleet, self._rates, self._decoder = case, shape, fleet, rates, decoder
        self.names = pick_for(case, list(fleet.unets))
        self.failed = dict(failed or {})
        weight = next(fleet.unpatched.parameters())
        self.device, self._dtype = weight.device, weight.dtype
        self._calls = dict.fromkeys(self.names, 1)
        self._begins = {name: _begins(fleet.unets[name]) for name in self.names}
        self._runs = {name: self._prepare(name, fleet.unets[name], fleet.unpatched) for name in self.names}

    def _prepare(self, name: str, unet: nn.Module, unpatched: nn.Module) -> Callable[[], Any]:
        if self.case.what == CALL:
            return self._call(name, unet, self.case.pixels, self.case.batch)
        return picture_run(self.case, self._shape, unpatched, unet, self._decoder)

    def _call(self, name: str, unet: nn.Module, pixels: int, batch: int) -> Callable[[], Any]:
        positional, named = make_inputs(self._shape, pixels, batch, str(self.device), self._dtype)
        begin, pictures = self._begins[name], pictures_in(batch)
        return lambda: (begin(pictures), unet(*positional, **named))[1]

    def warm_up(self) -> None:
        """Run every variant once, unmeasured; on a GPU, find out how often it has to be called for a steady time."""
        self._each(lambda name: self._runs[name]() is None)
        if self.device.type == "cuda" and self.case.what == CALL:
            once = self._each(lambda name: seconds(self._runs[name], self.device))
            self._calls |= {name: max(1, min(_MOST_CALLS, int(_ENOUGH_SECONDS / t))) for name, t in once.items()}

    def costs(self) -> dict[str, Any]:
        """A row: the work of one run (kernels launched on a GPU, else operators), its roofline, and its peak memory
        beyond the model.

        Counts as the warm-up. The memory of a CPU's pictures is left out: the decoder's is all there would be to see.
        """
        row: dict[str, Any] = {"case": vars(self.case)}
        if self.device.type == "cuda" or self.case.compiled:
            self.warm_up()
        else:  # only what has to have run before, because a call may take a minute here
            self._each(lambda name: VARIANTS[name].keeps and self._runs[name]() is None)
        if self.device.type == "cuda":
            row["peak_mib"] = self._each(lambda name: speed_costs.cuda_peak(self._runs[name]))
            row["kernels"] = self._each(lambda name: speed_costs.kernels(self._runs[name]))
        elif self.case.what == CALL and not self.case.compiled:
            row["peak_mib"] = self._each(self._process_peak)
        counted = self._each(self._count)
        if self.device.type == "cpu" and not self.case.compiled:  # one fused loop may be any number of operators
            row["operators"] = {name: operators for name, (operators, _) in counted.items()}
        row["rates"] = self._rates._asdict()
        row["roofline"] = {name: bound._asdict() for name, (_, bound) in counted.items()}
        return {**row, "failed": dict(self.failed)}

    def _count(self, name: str) -> tuple[int, Roofline]:
        """Operators and roofline of one eager run: what a compiled one has to compute is the same."""
        eager = [getattr(unet, "_orig_mod", unet) for unet in (self._fleet.unets[name], self._fleet.unpatched)]
        with speed_costs.OperatorCount() as counter:
            bound = speed_costs.roofline(self._prepare(name, *eager), self._rates)
        return counter.count, bound

    def _process_peak(self, name: str) -> float | None:
        small = self._call(name, self._fleet.unets[name], _SMALL_PIXELS * self._shape.shrink, 2)
        return speed_costs.process_peak(self._runs[name], small)

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
                if clock and self.case.what == CALL:
                    blocks[name] = clock.seconds
        row = {"case": vars(self.case), "round": number, "seconds": times}
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
            self.failed[name] = speed_costs.reason(error)
        # outside the handler, whose traceback keeps the tensors of the failed call alive
        speed_costs.free_memory(self.device)
        return None


def _begins(unet: nn.Module) -> Callable[[int], None]:
    """What is told before a call, of so many pictures; nothing where nobody asks."""
    begin_calls = getattr(unet, "begin_calls", None)
    return begin_calls() if begin_calls else lambda pictures: None


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


def measure_rates(device: str, dtype: torch.dtype) -> Rates:
    """The rates of a device: products in this dtype, and bytes read and written by a copy. Takes a second or two."""
    matrices = [torch.ones(side, side, device=device, dtype=dtype) for side in _SIDES[torch.device(device).type]]
    products = max(2 * len(one) ** 3 / _least(lambda one=one: one @ one, one.device) for one in matrices)
    source = torch.ones(_COPIED[torch.device(device).type], device=device, dtype=torch.uint8)
    target = torch.empty_like(source)
    return Rates(products, 2 * len(source) / _least(lambda: target.copy_(source), source.device))


def _least(run, device: torch.device) -> float:
    return max(min(seconds(run, device) for _ in range(_TIMES)), 1e-9)
