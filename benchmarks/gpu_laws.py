"""The rows of ``benchmarks.gpu`` that time little: what the device is, which attention functions work on it, and laws.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import subprocess  # noqa: TID251 - the project's own tests of its kernels run in a process of their own
import sys
import traceback
import warnings
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks import memory, timing
from benchmarks.gpu_rows import Bench, OutOfTime, Patched
from benchmarks.models import inputs, twin
from benchmarks.results import ROOT
from tome_core.merging import kernels

_BACKENDS = ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH")
KERNEL_LAWS = "tests/kernel_laws.py", "tests/kernel_faults.py"


def device(bench: Bench) -> dict[str, Any]:
    """Versions, what keeps the kernels away, and each attention function: its milliseconds, or why it fails."""
    tokens = {"cpu": 256, "cuda": 4096}[bench.device]
    of = [torch.randn(2, 8, tokens, 64, device=bench.device, dtype=bench.dtype) for _ in range(3)]
    functions = {f"torch {name.lower()}": partial(_by_backend, name) for name in _BACKENDS} | _PACKAGES
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # each backend says at length what it cannot do
        attention = {name: _attempt(partial(one, *of), bench.device) for name, one in functions.items()}
    there = kernels.available(torch.device(bench.device))
    return {
        "triton": importlib.import_module("triton").__version__ if importlib.util.find_spec("triton") else None,
        "capability": ".".join(map(str, torch.cuda.get_device_capability())) if bench.device != "cpu" else None,
        "kernels": "; ".join(kernels.notes()) or ("in use" if there else "none for this device"),
        "attention, ms": attention,
    }


def _attempt(run: timing.Run, device: str) -> float | str:
    """Milliseconds of a call, or why it fails."""
    try:
        run()
        return 1e3 * min(timing.seconds(run, device) for _ in range(3))
    except ImportError:
        return "not installed"
    except Exception as error:
        return memory.reason(error)


def _by_backend(name: str, *of: torch.Tensor) -> torch.Tensor:
    with sdpa_kernel(getattr(SDPBackend, name)):
        return F.scaled_dot_product_attention(*of)


def _tokens_first(module: str, function: str, *of: torch.Tensor) -> torch.Tensor:
    return getattr(importlib.import_module(module), function)(*(one.transpose(1, 2) for one in of))


_PACKAGES = {
    "xformers": partial(_tokens_first, "xformers.ops", "memory_efficient_attention"),
    "flash_attn": partial(_tokens_first, "flash_attn", "flash_attn_func"),
    "sageattention": lambda *of: importlib.import_module("sageattention").sageattn(*of, tensor_layout="HND"),
}


def kernel_laws(bench: Bench) -> dict[str, Any]:
    """Each kernel against torch's operators: the project's own tests of them, if pytest is there to run them."""
    if not kernels.available(torch.device(bench.device)):
        return {"skipped": "; ".join(kernels.notes()) or "no kernels for this device"}
    if importlib.util.find_spec("pytest") is None:
        return {"skipped": "pytest is not installed: pip install pytest"}
    try:
        done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *KERNEL_LAWS], cwd=ROOT,
                              capture_output=True, text=True, check=False, timeout=max(1.0, bench.left))  # fmt: skip
    except subprocess.TimeoutExpired:
        raise OutOfTime from None
    told = done.stdout.strip().splitlines() or done.stderr.strip().splitlines() or [""]
    return {"hold": done.returncode == 0, "said": told[-1], **({"log": done.stdout[-4000:]} if done.returncode else {})}


def laws(bench: Bench, name: str, pixels: int) -> dict[str, Any]:
    """Of whole calls of a network. Shares are of norms of what a call gives."""
    network, arguments = bench.network(name), inputs(name, pixels, bench.device, bench.dtype, bench.tiny)
    expected = network(*arguments)
    with sdpa_kernel(SDPBackend.MATH):
        otherwise = _share(network(*arguments), expected, expected)
    merged = Patched(twin(network), "balanced")
    new, kept = merged.call(arguments, "new"), merged.call(arguments, "kept")
    found = [new() for _ in range(10)]
    with kernels.without():
        without = new()
    kept()
    kept()
    waits = _waits(kept, bench.device)
    merged.handle.remove()
    return {
        "equal bits in ten runs": all(torch.equal(one, found[0]) for one in found),
        "a kept step waits": waits,
        "removed, the bits of the unmerged call": torch.equal(merged.network(*arguments), expected),
        "finite": bool(torch.isfinite(found[0]).all()),
        "merging changes": _share(found[0], expected, expected),
        "kernels change": _share(found[0], without, expected),
        "another attention function of torch's changes": otherwise,
    }


def _share(one: torch.Tensor, other: torch.Tensor, of: torch.Tensor) -> float | str:
    share = ((one.float() - other.float()).norm() / of.float().norm()).item()
    return share if math.isfinite(share) else str(share)  # which JSON has no number for


def _waits(run: timing.Run, device: str) -> str | bool:
    """Where a call waits for the GPU; False if it does not."""
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    except RuntimeError:
        return traceback.format_exc()[-600:]
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    return False
