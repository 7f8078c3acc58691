"""The calls of the engine's Python functions, counted."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from types import FrameType
from typing import Any

import tome_core


def beyond(called: list[str], other: list[str]) -> dict[str, Any]:
    """What one run calls and the other does not, of what `watch` gives: as plain data.

    calls, functions, files, and changes from file to file: how many; by: calls of each function, the most first.
    """
    functions = Counter(called) - Counter(other)
    return {
        "calls": functions.total(), "functions": len(functions), "files": len(set(map(_file, functions))),
        "changes": _changes(called) - _changes(other), "by": dict(functions.most_common()),
    }  # fmt: skip


def _file(name: str) -> str:
    return name.partition(":")[0]


def _changes(called: list[str]) -> int:
    return sum(_file(one) != _file(other) for one, other in pairwise(called))


def watch(run: Callable[[], Any]) -> list[str]:
    """The Python functions of the engine that are called meanwhile, in order, as ``file:name``.

    A generator counts each time it is resumed.
    """
    package = os.path.dirname(tome_core.__file__) + os.sep
    called: list[str] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(package):
            file = code.co_filename[len(package) :].replace(os.sep, "/")
            called.append(f"{file}:{getattr(code, 'co_qualname', code.co_name)}")  # the former from Python 3.11 on

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(before)
    return called
