"""The calls of our own Python functions, counted."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from types import FrameType
from typing import Any, NamedTuple


class Way(NamedTuple):
    """The calls of our Python functions: function -> how often, as ``file:name``; changes: from file to file."""

    functions: Counter[str]
    changes: int

    def __sub__(self, other: Way) -> Way:
        return Way(self.functions - other.functions, self.changes - other.changes)

    def as_data(self) -> dict[str, Any]:
        """calls, functions, files, changes: how many; by: calls of each function, the most first."""
        files = {name.partition(":")[0] for name in self.functions}
        return {
            "calls": self.functions.total(), "functions": len(self.functions), "files": len(files),
            "changes": self.changes, "by": dict(self.functions.most_common()),
        }  # fmt: skip


def calls_of(run: Callable[[], Any]) -> Way:
    """What is called meanwhile."""
    called = watch(run)
    files = [name.partition(":")[0] for name in called]
    return Way(Counter(called), sum(one != other for one, other in pairwise(files)))


def watch(run: Callable[[], Any]) -> list[str]:
    """The Python functions of this package that are called meanwhile, in order, as ``file:name``.

    A generator counts each time it is resumed. What the measuring itself consists of is left out.
    """
    measuring = os.path.dirname(__file__)
    package = os.path.dirname(measuring) + os.sep
    called: list[str] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(package) and not code.co_filename.startswith(measuring):
            file = code.co_filename[len(package) :].replace(os.sep, "/")
            called.append(f"{file}:{getattr(code, 'co_qualname', code.co_name)}")  # the former from Python 3.11 on

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(before)
    return called
