"""Counting the calls of our functions, for which a fast GPU waits."""

import os
import sys
from collections import Counter
from collections.abc import Callable
from types import CodeType, ModuleType


def code_called(run: Callable, folders: tuple[str, ...]) -> list[CodeType]:
    """The code, from files in these folders, that a run calls, in order; a generator's each time it is resumed."""
    called: list[CodeType] = []

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(folders):
            called.append(frame.f_code)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(before)
    return called


def functions_called(run: Callable, *packages: ModuleType) -> Counter[str]:
    """The names of the functions of these packages that a run calls, with their numbers."""
    folders = tuple(os.path.dirname(package.__file__) + os.sep for package in packages)
    return Counter(code.co_name for code in code_called(run, folders))
