"""``python -m benchmarks.unfused_call JSON``: the calls of a source's cases, in its own Python; prints what each took.

A case is ``{"source", "what", "pixels", "heads", "preset", "free"}``; see `benchmarks.unfused`, which calls this.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from benchmarks.speed_memory import CallFailed, process_peak
from benchmarks.unfused_hosts import CHANNELS, CONTEXT, HEADS, Loaded, load

ANSWER = "measured: "  # how a line that is meant begins: hosts print lines of their own
_WORDS, _SMALL = 77, 128
# timesteps of calls, one after the other: between the second and the first a match is kept
TIMES = {"unmerged": {"call": 100.0}, "tomesd": {"call": 100.0},
         "early": {"new": 900.0, "kept": 890.0}, "late": {"new": 100.0, "kept": 90.0}}  # fmt: skip


def inputs(pixels: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One picture's tokens as a latent ``[1, 320, h, w]``, a timestep, a prompt ``[1, 77, 768]``."""
    dice = torch.Generator().manual_seed(1)
    side = pixels // 8
    return (torch.randn(1, CHANNELS, side, side, generator=dice), torch.tensor([100]),
            torch.randn(1, _WORDS, CONTEXT, generator=dice))  # fmt: skip


@contextmanager
def put_on(loaded: Loaded, what: str, preset: str) -> Iterator[Callable[[float], None]]:
    """Merging of this kind; gives what is told the timestep before a call."""
    if what == "unmerged":
        yield lambda timestep: None
    elif what == "tomesd":
        with loaded.tomesd(loaded.unet):
            yield lambda timestep: None
    else:
        tome_core = importlib.import_module("tome_core")
        with tome_core.patch(loaded.unet, preset, host_clock=True) as merging:
            sampling = object()
            yield lambda timestep: merging.set_time(timestep=timestep, sampling=sampling)
            if not merging.report().merged_anything:
                raise RuntimeError(f"nothing merged: {merging.report()}")


def measured(loaded: Loaded, case: dict[str, Any]) -> dict[str, Any]:
    """peak_mib: the highest of its calls, beyond the model; seconds: processor time of each."""
    block = next(module for module in loaded.unet.modules() if type(module).__name__ == "BasicTransformerBlock")
    block.attn1 = loaded.attention(case["heads"])
    loaded.unet.eval().requires_grad_(False)
    loaded.say_free(case["free"] * case["heads"] // HEADS)
    times = TIMES[case["what"]]
    seconds = torch.zeros(len(times)).share_memory_()  # written in a fork

    def run() -> None:
        with put_on(loaded, case["what"], case["preset"]) as tell:
            for number, timestep in enumerate(times.values()):
                tell(timestep)
                since = time.process_time()
                loaded.unet(*inputs(case["pixels"]))
                seconds[number] = time.process_time() - since

    with torch.inference_mode(), loaded.around():
        peak = process_peak(run, lambda: loaded.unet(*inputs(_SMALL)))
    return {"peak_mib": peak, "seconds": dict(zip(times, seconds.tolist(), strict=True))}


def main() -> None:
    """Measure the cases that the command line names, all of one source: a line of JSON each."""
    cases = json.loads(sys.argv.pop(1))  # what is left is the host's own
    torch.set_num_threads(1)
    loaded = load(cases[0]["source"])
    for case in cases:
        try:
            answer = measured(loaded, case)
        except CallFailed as error:
            answer = {"failed": str(error)}
        print(f"{ANSWER}{json.dumps(answer)}", flush=True)


if __name__ == "__main__":
    main()
