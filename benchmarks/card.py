"""``python -m benchmarks.card FILE --seconds S``: what merging costs and gains on this graphics card.

Whole UNet calls of SD1.5's and SDXL's shapes and one block of SD1.5's, with random weights, in half precision, batch 2:
unmerged, with tomesd, and by a strength in a step that matches anew, renews a match, or keeps one, with Triton's
kernels and without. Variants take turns; medians. Of each: milliseconds by the clock, milliseconds in which the card
worked, launches, and peak memory beyond the model. Then whole samplings of 20 steps, and three laws: equal bits in ten
runs, no wait for the device in a kept step, and kernels that change a picture by rounding alone.

The file is written after each row. Without a card the same runs on tiny models, to see that the command works.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tomesd
import torch
from torch.profiler import ProfilerActivity, profile

import tome_core
from benchmarks import results
from benchmarks import speed_models as models
from benchmarks.sd_block import as_ldm_model, make_block
from benchmarks.sd_block import make_inputs as block_inputs
from tome_core.measuring.pays import Pays
from tome_core.merging import kernels

Run = Callable[[], Any]
_STEPS = 20
# timesteps told in turn: a match is made anew in each call, renewed from an older one, or kept
WHEN = {"new": (900.0,), "renewed": (900.0, 800.0), "kept": (900.0, 890.0),
        "late new": (200.0, 100.0), "late kept": (100.0, 90.0)}  # fmt: skip
_KERNELS = ("best_keys", "mean_rows", "segments", "first_order", "answer_few")


class Card:
    """Measures on one device, and writes what it has found.

    Args:
        path: of the JSON file.
        seconds: after which no other row is begun.
    """

    def __init__(self, path: Path, seconds: float) -> None:
        self.is_real = torch.cuda.is_available()
        self.device, self.dtype = ("cuda", torch.float16) if self.is_real else ("cpu", torch.float32)
        self.shapes = models.SHAPES if self.is_real else models.TINY_SHAPES
        self._path, self._end = path, time.monotonic() + seconds
        self._model: tuple[str, Any] = ("", None)
        self.record: dict[str, Any] = {**results.describe(self.device), "rows": [], "laws": {}, "errors": []}

    def save(self) -> None:
        """Write all that is known."""
        self.record["kernels"] = list(kernels.notes()) or "in use"
        self._path.write_text(json.dumps(self.record, indent=1) + "\n", encoding="utf-8")

    def attempt(self, row: Callable[..., None], *args: Any) -> None:
        """Measure a row if there is time; an error is kept, and the next row goes on."""
        if time.monotonic() > self._end:
            return
        try:
            with torch.inference_mode():
                row(self, *args)
        except Exception:
            self.record["errors"].append(f"{row.__name__} {args}: {traceback.format_exc()[-1500:]}")
            print(self.record["errors"][-1], flush=True)
        self.save()

    def unet(self, name: str) -> Any:
        """One model at a time is in memory."""
        if self._model[0] != name:
            self._model = ("", None)
            self._model = (name, models.make_unet(self.shapes[name], self.device, self.dtype))
        return self._model[1]

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.is_real:
            torch.cuda.synchronize()

    def compare(self, what: str, runs: dict[str, Run], rounds: int, calls: int) -> None:
        """A row: each run's median over the rounds, in which they take turns."""
        failed, clock = {}, {name: [] for name in runs}
        for name, run in runs.items():
            try:
                run(), run(), self.synchronize()
            except Exception as error:
                failed[name] = f"{type(error).__name__}: {str(error)[:200]}"
        for _ in range(rounds):
            for name in runs.keys() - failed.keys():
                clock[name].append(self.milliseconds(runs[name], calls))
        found = {name: {"ms": statistics.median(clock[name]), "least": min(clock[name]), "most": max(clock[name]),
                        **self._work(run)} for name, run in runs.items() if name not in failed}  # fmt: skip
        self.record["rows"].append({"what": what, "failed": failed, "of": found})
        told = (f"{name} {one['ms']:.2f}/{one.get('card_ms', 0):.2f} ms {one.get('launches', 0):.0f} launches"
                for name, one in found.items())  # fmt: skip
        print(f"{what} [{self._end - time.monotonic():.0f} s left] {'; '.join(told)} {failed or ''}", flush=True)

    def milliseconds(self, run: Run, calls: int) -> float:
        """Of a call, by the clock: the mean of so many in a row."""
        self.synchronize()
        since = time.perf_counter()
        for _ in range(calls):
            run()
        self.synchronize()
        return (time.perf_counter() - since) / calls * 1e3

    def _work(self, run: Run, calls: int = 2) -> dict[str, Any]:
        """Of a call: how long the card works, its launches, the kernels that take longest, and peak memory."""
        if not self.is_real:
            return {}
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            for _ in range(calls):
                run()
            torch.cuda.synchronize()
        of_name: dict[str, float] = {}
        launches = 0
        for event in seen.events():
            if event.device_type == torch.autograd.DeviceType.CUDA:
                launches += 1
                of_name[event.name[:60]] = of_name.get(event.name[:60], 0.0) + event.device_time / calls
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        torch.cuda.synchronize()
        longest = sorted(of_name.items(), key=lambda item: -item[1])[:12]
        return {"card_ms": sum(of_name.values()) / 1e3, "launches": launches / calls,
                "peak_mib": (torch.cuda.max_memory_allocated() - before) / 2**20,
                "kernels_us": {name: round(spent, 1) for name, spent in longest}}  # fmt: skip


@contextlib.contextmanager
def lacking(*names: str) -> Any:
    """Inside it these kernels cannot run."""
    plain = {name: getattr(kernels, name) for name in names}
    for name in names:
        setattr(kernels, name, lambda *_, **__: None)
    try:
        yield
    finally:
        for name, one in plain.items():
            setattr(kernels, name, one)


def patched(model: Any, strength: str) -> tuple[Any, tome_core.Patch]:
    """The model with merging in every size of picture."""
    handle = tome_core.patch(model, strength, host_clock=True)
    handle.pays = Pays((), (), always=True)
    return model, handle


def call(made: tuple[Any, tome_core.Patch], arguments: tuple, named: dict, when: str, inside: Any = None) -> Run:
    """Calls in which a match is made anew, renewed or kept."""
    model, handle = made
    times, state = WHEN[when], {"number": 0, "sampling": object()}

    def run() -> Any:
        timestep = times[state["number"] % len(times)]
        state["number"] += 1
        sampling = state["sampling"] if len(times) > 1 else object()
        handle.set_time(timestep=timestep, sampling=sampling, pictures=1)
        with inside() if inside else contextlib.nullcontext():
            return model(*arguments, **named)

    return run


def block(card: Card, side: int) -> None:
    """A block of 320 channels, by each kernel's worth."""
    arguments, plain = block_inputs(side, 2, card.device, card.dtype), make_block(card.device, card.dtype)
    rival = make_block(card.device, card.dtype)
    tomesd.apply_patch(as_ldm_model(rival), ratio=0.5)
    runs: dict[str, Run] = {"unmerged": lambda: plain(*arguments), "tomesd": lambda: rival(*arguments)}

    def add(name: str, when: str, inside: Any = None) -> None:
        made = patched(make_block(card.device, card.dtype), "balanced")
        runs[name] = call(made, arguments, {}, when, inside)

    for when in WHEN:
        add(when, when)
    for when in ("new", "renewed", "kept"):
        add(f"{when}, without Triton", when, kernels.without)
    for name in _KERNELS:
        add(f"new, without {name}", "new", lambda name=name: lacking(name))
    add("kept, without correct", "kept", lambda: lacking("correct"))
    card.compare(f"block of 320 channels, {side}x{side} tokens", runs, *((5, 20) if card.is_real else (1, 1)))


def beside_tomesd(card: Card, model: str, pixels: int) -> tuple[Any, Any, tuple, dict]:
    """A UNet, its twin that tomesd has patched, and what a call of them is given."""
    plain, rival = card.unet(model), models.twin(card.unet(model))
    tomesd.apply_patch(rival, ratio=0.5, max_downsample=1 if model == "sd15" else 2)
    return plain, rival, *models.make_inputs(card.shapes[model], pixels, 2, card.device, card.dtype)


def calls(card: Card, model: str, pixels: int) -> None:
    """Calls of a whole UNet."""
    plain, rival, arguments, named = beside_tomesd(card, model, pixels)
    runs: dict[str, Run] = {"unmerged": lambda: plain(*arguments, **named)}
    runs["tomesd"] = lambda: rival(*arguments, **named)
    for when in WHEN:
        runs[when] = call(patched(models.twin(plain), "balanced"), arguments, named, when)
    for when in ("renewed", "kept"):
        made = patched(models.twin(plain), "balanced")
        runs[f"{when}, without Triton"] = call(made, arguments, named, when, kernels.without)
    card.compare(f"{model} call, {pixels} px", runs, *((3, 3) if card.is_real else (1, 1)))


def samplings(card: Card, model: str, pixels: int) -> None:
    """Twenty steps, and nothing else of a picture."""
    plain, rival, arguments, named = beside_tomesd(card, model, pixels)
    timesteps = [999.0 - 1000 / _STEPS * number for number in range(_STEPS)]

    def steps(unet: Any, handle: tome_core.Patch | None = None) -> Run:
        def run() -> None:
            picture = object()
            for timestep in timesteps:
                if handle is not None:
                    handle.set_time(timestep=timestep, sampling=picture, pictures=1)
                unet(*arguments, **named)

        return run

    runs = {"unmerged": steps(plain), "tomesd": steps(rival)}
    for strength in ("balanced", "fast", "max"):
        runs[strength] = steps(*patched(models.twin(plain), strength))
    clock = {name: [] for name in runs}
    for run in runs.values():
        run()
    for _ in range(2):
        for name, run in runs.items():
            clock[name].append(card.milliseconds(run, 1))
    found = {name: {"ms": min(spent)} for name, spent in clock.items()}
    card.record["rows"].append({"what": f"{model} sampling of {_STEPS} steps, {pixels} px", "failed": {}, "of": found})
    print(card.record["rows"][-1], flush=True)


def compiled(card: Card, model: str, pixels: int) -> None:
    """Calls of a compiled UNet."""
    shape, plain = card.shapes[model], card.unet(model)
    arguments, named = models.make_inputs(shape, pixels, 2, card.device, card.dtype)
    alone, (twin, handle) = torch.compile(models.twin(plain)), patched(models.twin(plain), "balanced")
    merged = torch.compile(twin)
    runs: dict[str, Run] = {"unmerged": lambda: alone(*arguments, **named)}
    for when in ("renewed", "kept"):
        runs[when] = call((merged, handle), arguments, named, when)
    card.compare(f"{model} call, {pixels} px, compiled", runs, 3, 3)


def laws(card: Card, model: str, pixels: int) -> None:
    """Equal bits, no wait, and rounding alone."""
    plain = card.unet(model)
    arguments, named = models.make_inputs(card.shapes[model], pixels, 2, card.device, card.dtype)
    expected = plain(*arguments, **named).sample.float()
    twin, handle = patched(models.twin(plain), "balanced")
    new = call((twin, handle), arguments, named, "new")
    found = [new().sample.float() for _ in range(10)]
    with kernels.without():
        without = new().sample.float()
    kept = call((twin, handle), arguments, named, "kept")
    kept(), kept()
    waits = ""
    if card.is_real:
        torch.cuda.set_sync_debug_mode("error")
    try:
        kept()
    except RuntimeError as error:
        waits = traceback.format_exc()[-600:] or str(error)
    finally:
        if card.is_real:
            torch.cuda.set_sync_debug_mode("default")
    merging = (found[0] - expected).norm()
    card.record["laws"][f"{model}, {pixels} px"] = told = {
        "equal bits in ten runs": all(torch.equal(one, found[0]) for one in found),
        "kernels change, as a share of what merging changes": ((found[0] - without).norm() / merging).item(),
        "merging changes, as a share of the prediction": (merging / expected.norm()).item(),
        "a kept step waits": waits or False,
    }
    handle.remove()
    told["removed, the bits of the unmerged call"] = torch.equal(twin(*arguments, **named).sample.float(), expected)
    print(told, flush=True)


def main() -> int:
    """Measure; 1 if a row failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, help="the JSON file")
    parser.add_argument("--seconds", type=float, default=500.0, help="begin no row after these")
    options = parser.parse_args()
    card = Card(options.path, options.seconds)
    if not card.is_real:
        for row, *args in ((block, 16), (calls, "sd15", 512), (laws, "sd15", 512), (samplings, "sd15", 512)):
            card.attempt(row, *args)
        return bool(card.record["errors"])
    for side in (64, 128):
        card.attempt(block, side)
    for model, pixels in (("sd15", 1024), ("sd15", 2048)):
        card.attempt(laws, model, min(pixels, 1024))
        card.attempt(calls, model, pixels)
        card.attempt(samplings, model, pixels)
    for pixels in (1024, 2048):
        card.attempt(calls, "sdxl", pixels)
        card.attempt(samplings, "sdxl", pixels)
    card.attempt(laws, "sdxl", 1024)
    card.attempt(compiled, "sdxl", 1024)
    for model, pixels in (("sd15", 1536), ("sdxl", 1536), ("sd15", 768), ("sd15", 512)):
        card.attempt(calls, model, pixels)
    card.attempt(compiled, "sd15", 1024)
    return bool(card.record["errors"])


if __name__ == "__main__":
    sys.exit(main())
