"""Whether a compiler goes through this code, and what it is told of it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch._guards import TracingContext


def is_tracing() -> bool:
    """Asked after `torch.compiler.is_compiling`: does this thread compile or export?

    While one thread compiles, torch 2.13 says so in all of them, also to code that runs there as it stands.
    """
    return torch.compiler.is_dynamo_compiling() or TracingContext.try_get() is not None


def when_traced(method: Callable) -> Callable:
    """Make a compiler call the method once, while it traces, instead of looking inside.

    As `torch.compiler.assume_constant_result`, without its import of the compiler. Arguments have to be constants.
    """
    method._dynamo_marked_constant = True
    return method
