"""Helpers for code that torch.compile traces."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch._guards import TracingContext


def is_tracing() -> bool:
    """Tell whether this thread compiles or exports. Call it only if `torch.compiler.is_compiling` is true.

    While one thread compiles, torch 2.13's `is_compiling` is true in all threads, also in code that runs eagerly.
    """
    return torch.compiler.is_dynamo_compiling() or TracingContext.try_get() is not None


def when_traced(method: Callable) -> Callable:
    """Mark a function, in place, so that compilers run it while they trace and take its result as a constant.

    Arguments have to be constants. This is `torch.compiler.assume_constant_result` without the compiler's import.
    """
    method._dynamo_marked_constant = True
    return method
