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
    """Mark a function so that the compiler runs it while it traces, and takes its result as a constant.

    Arguments have to be constants, and the function's code is not traced. The function is marked in place and returned.
    The mark is that of `torch.compiler.assume_constant_result`, set without importing the compiler.
    """
    method._dynamo_marked_constant = True
    return method
