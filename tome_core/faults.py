"""Errors inside a call of the model: which of them fewer tokens may have caused, and which are this package's own.

After either, the part that was called runs again on all tokens. All other errors pass: a host's interrupt, which may be
an exception of any class, lack of memory, and errors of the device.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable
from functools import cache
from typing import Any

_log = logging.getLogger(__name__)
_OURS = [os.path.join(os.path.dirname(__file__), "")]  # folders of this package and of its hosts' code
# What tensors of unexpected shapes raise, by hosts' code too. Compared exactly: a class of a host's own, such as an
# interrupt, may derive from these, as torch's for lack of memory and for errors of the device do.
_OF_SHAPES = frozenset({ArithmeticError, AssertionError, IndexError, KeyError, LookupError, NotImplementedError,
                        RuntimeError, TypeError, ValueError, ZeroDivisionError})  # fmt: skip
_OF_EINOPS = "EinopsError"
_OF_COMPILERS = ("torch._dynamo.", "torch._inductor.")  # modules of their errors: another size is compiled anew
# Lack of memory and errors of devices are RuntimeErrors in most backends.
_OF_DEVICES = re.compile(
    r"memory|alloc|device[- ]side|device (was |is )?(lost|removed|hung|not ready)|_STATUS_|UR_RESULT|UR error|"
    r"\b(CUDA|HIP|XPU|SYCL|Level.?Zero|MPS|Metal|DirectML|DML|cuDNN|MIOpen|NCCL|NPU|privateuseone)\b.*"
    r"\b(error|fail\w*|backend)|hipError|cudaError",
    re.IGNORECASE)  # fmt: skip


class DeliberateError(RuntimeError):
    """An error that this package raises in a call of the model on purpose, because its result would be wrong."""


def may_be_of_fewer_tokens(error: BaseException) -> bool:
    """Tell whether fewer tokens than usual may have caused an error, and not a host, lack of memory or a device."""
    kind = type(error)
    is_one = kind in _OF_SHAPES or kind.__name__ == _OF_EINOPS or kind.__module__.startswith(_OF_COMPILERS)
    return is_one and _OF_DEVICES.search(str(error)) is None


def is_ours(error: BaseException) -> bool:
    """Tell whether this package's own code raised an error by mistake; the first of each kind is logged."""
    kind = type(error)  # our mistakes are Python's errors; a host's, torch's and `DeliberateError` have own classes
    if kind.__module__ != "builtins" or not issubclass(kind, Exception) or issubclass(kind, (MemoryError, OSError)):
        return False
    if _OF_DEVICES.search(str(error)):
        return False
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    code = None if trace is None else trace.tb_frame.f_code
    if code is None or not code.co_filename.startswith(tuple(_OURS)):
        return False
    _warn_once(f"{code.co_qualname if hasattr(code, 'co_qualname') else code.co_name}: {text_of(error)}")
    return True


def add_own_folder(folder: str) -> None:
    """Let errors that are raised by code in a folder count as this package's own, see `is_ours`."""
    _OURS.append(os.path.join(folder, ""))


def quietly(function: Callable, *args: Any) -> None:
    """Call a function that only keeps books, and swallow an error of this package's own."""
    try:
        function(*args)
    except Exception as error:
        if not is_ours(error):
            raise


def text_of(error: BaseException) -> str:
    """Return an error's class and the beginning of its text, in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:80]}"


@cache
def _warn_once(text: str) -> None:
    """Log an error of this package, once in this process."""
    _log.warning("token merging left a part of the picture unmerged, because of an error of its own, which please "
                 "report: %s", text)  # fmt: skip
