"""The roofline of a call (Williams et al., 2009): how quick it could be here, computed from what it has to compute.

Counted are products (of matrices, convolutions, attention): each takes as long as its operations at the device's best
rate, or as its bytes (what it reads and writes, once) at the rate of a copy, whichever is longer. Everything else is
free, as if a compiler had put it into the products. So is what a kernel of somebody's own does inside: no bound is too
high for want of knowledge. What lies in a cache is read faster than a copy, which on a CPU can matter for small models.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_ATTENTION = ("scaled_dot_product", "_scaled_dot_product")
# operator -> which argument is its left factor, whose last dimension is summed over
_FACTORS = {"linear": 0, "mm": 0, "bmm": 0, "matmul": 0, "addmm": 1, "baddbmm": 1}
_CONVOLUTIONS = ("conv2d", "convolution")


class Rates(NamedTuple):
    """What a device reaches: floating-point operations a second in a product, bytes a second, read and written."""

    operations: float
    bytes: float


class Roofline(NamedTuple):
    """Of one call: floating-point operations and bytes of its products, and the seconds they take at least."""

    operations: int
    bytes: int
    seconds: float


class _Products(TorchDispatchMode):
    def __init__(self, rates: Rates) -> None:
        super().__init__()
        self._rates = rates
        self.operations = self.bytes = 0
        self.seconds = 0.0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        operations = product_operations(function.overloadpacket.__name__, args, out)
        if operations:
            moved = sum(_bytes(one) for one in (*args, *(kwargs or {}).values(), *_listed(out)))
            self.operations += operations
            self.bytes += moved
            self.seconds += max(operations / self._rates.operations, moved / self._rates.bytes)
        return out


def roofline(run: Callable[[], Any], rates: Rates) -> Roofline:
    """The roofline of what runs, on a device of these rates. It has to be eager: a compiled call is opaque."""
    with _Products(rates) as counted:
        run()
    return Roofline(counted.operations, counted.bytes, counted.seconds)


def product_operations(name: str, args: tuple, out: Any) -> int:
    """Floating-point operations of an operator; 0 where it is no product. A multiply and an add are two."""
    if name.startswith(_ATTENTION):
        queries, keys, values = args[:3]
        return 2 * math.prod(queries.shape[:-1]) * keys.shape[-2] * (queries.shape[-1] + values.shape[-1])
    if name in _CONVOLUTIONS:
        return 2 * out.numel() * args[1][0].numel()
    if name in _FACTORS:
        return 2 * out.numel() * args[_FACTORS[name]].shape[-1]
    return 0


def _listed(out: Any) -> tuple:
    """What an operator writes; of several tensors, such as attention's, the first alone is sure to be wanted."""
    return (out[0] if isinstance(out, tuple | list) else out,)


def _bytes(one: Any) -> int:
    """Of a tensor as it lies in memory: one that is expanded is no longer for it."""
    if not torch.is_tensor(one):
        return 0
    return min(one.numel() * one.element_size(), one.untyped_storage().nbytes())
