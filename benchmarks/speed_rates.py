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
    kind = torch.device(device).type
    products = max(2 * side**3 / _product_seconds(side, device, dtype) for side in _SIDES.get(kind, _SIDES["cpu"]))
    return Rates(products, _copied_a_second(_COPIED.get(kind, _COPIED["cpu"]), device))


def _product_seconds(side: int, device: str, dtype: torch.dtype) -> float:
    matrix = torch.ones(side, side, device=device, dtype=dtype)
    return _least(lambda: matrix @ matrix, matrix.device)


def _copied_a_second(size: int, device: str) -> float:
    source = torch.ones(size, device=device, dtype=torch.uint8)
    target = torch.empty_like(source)
    return 2 * size / _least(lambda: target.copy_(source), source.device)


def _least(run, device: torch.device) -> float:
    return max(min(seconds(run, device) for _ in range(_TIMES)), 1e-9)
