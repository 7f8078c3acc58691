"""What a device reaches at its best, measured: products and copies, which a roofline is computed from."""

from __future__ import annotations

import torch

from benchmarks.speed_measure import seconds
from benchmarks.speed_roofline import Rates

_SIDES = {"cpu": (512, 1024), "cuda": (4096, 8192)}  # of square products, of which the best counts
_COPIED = {"cpu": 2**28, "cuda": 2**30}  # bytes, more than any cache holds
_TIMES = 5


def measure_rates(device: str, dtype: torch.dtype) -> Rates:
    """The rates of a device: products in this dtype, and bytes read and written by a copy. Takes a second or two."""
    matrices = [torch.ones(side, side, device=device, dtype=dtype) for side in _SIDES[torch.device(device).type]]
    products = max(2 * len(one) ** 3 / _least(lambda one=one: one @ one, one.device) for one in matrices)
    source = torch.ones(_COPIED[torch.device(device).type], device=device, dtype=torch.uint8)
    target = torch.empty_like(source)
    return Rates(products, 2 * len(source) / _least(lambda: target.copy_(source), source.device))


def _least(run, device: torch.device) -> float:
    return max(min(seconds(run, device) for _ in range(_TIMES)), 1e-9)
