"""``python -m tests.kernels.host_time``: the host's microseconds for launches and for a block, without a GPU.

Kernels are compiled for a GPU that is not here and do nothing when launched; what a driver needs for a launch is not
counted. Tensors are tiny, so that most of the time is the host's.
"""

import copy
import gc
import time
from dataclasses import replace
from functools import partial

import torch

import tome_core
from tests.kernels.compiled_code import launch_all
from tests.kernels.direct_launches import pretend
from tests.small_models.sd_block import SpatialTransformer, UNet
from tome_core.merging import kernels
from tome_core.merging.kernels import triton_kernels_direct


def microseconds(runs):
    """The lowest decile of each run's times, taken in turns."""
    times = {name: [] for name in runs}
    gc.disable()
    for _ in range(400):
        for name, run in runs.items():
            run()
            start = time.perf_counter()
            run()
            times[name].append((time.perf_counter() - start) * 1e6)
    gc.enable()
    return {name: sorted(taken)[len(taken) // 10] for name, taken in times.items()}


def launches():
    """Name -> a function that launches the kernel once more, with the arguments of `launch_all`."""
    found, module = {}, kernels._module()
    functions = {name: getattr(module, name) for name in module.__all__}
    for name in functions:
        setattr(module, name, lambda *arguments, name=name: found.update({name: arguments}))
    launch_all(torch.float16)
    for name, function in functions.items():
        setattr(module, name, function)
    return {name: partial(functions[name], *arguments) for name, arguments in found.items()}


def calls():
    """Name -> a function that calls a UNet of one block."""
    model = UNet([[SpatialTransformer(16, 1, 8)]]).to(torch.bfloat16).requires_grad_(False)
    inputs = torch.randn(1, 16, 16, 16).bfloat16().repeat(2, 1, 1, 1), None, torch.randn(2, 7, 8).bfloat16()
    config, made = replace(tome_core.preset("balanced"), max_error=None), {"unmerged": lambda: model(*inputs)}
    for name, last in {"kept": 299.0, "renewed": 200.0}.items():
        merged, turn = copy.deepcopy(model), [300.0, last]
        handle = tome_core.patch(merged, config, host_clock=True, only_if_it_pays=False)

        def call(merged=merged, turn=turn, handle=handle):
            turn.reverse()
            handle.set_time(timestep=turn[0], sampling="one", pictures=1)
            merged(*inputs)

        made[name] = call
    return made


def main() -> None:
    torch.set_num_threads(1)
    pretend(lambda *_: lambda *_: None)
    torch.Tensor.new_empty = torch.Tensor.new_zeros  # results have to be valid numbers of tokens
    kernels.DEVICES, kernels._proves_itself = ("cpu",), lambda *_: True
    with torch.inference_mode():
        for name, runs in {"launches": launches(), "a block": calls()}.items():
            for triton_kernels_direct.why_off in ("", "by Triton"):
                times = (f"{run} {taken:.1f}" for run, taken in microseconds(runs).items())
                print(name, triton_kernels_direct.why_off or "direct", "us:", ", ".join(times))
    assert not kernels.notes(), kernels.notes()


if __name__ == "__main__":
    main()
