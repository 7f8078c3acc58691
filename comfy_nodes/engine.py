"""Finds the engine: beside this folder (a clone, a link, a copy), else installed, else where a link points to.

Of `tome_core` the nodes use `hosting` alone.
"""

from __future__ import annotations

import importlib
import os
import sys
from types import ModuleType


def _find() -> ModuleType:
    # ComfyUI names a pack by its path with every dot replaced, so a dot means: this is a part of the pack
    if "." in __package__:
        return importlib.import_module("..tome_core.hosting", __package__)
    try:
        return importlib.import_module("tome_core.hosting")
    except ModuleNotFoundError as error:
        if error.name != "tome_core":
            raise
    root = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
    if not os.path.isdir(os.path.join(root, "tome_core")):
        raise ModuleNotFoundError(
            f"tome_core was not found beside {os.path.dirname(__file__)}: clone the whole repository into "
            "custom_nodes, or run its `python install.py comfyui DIR`",
            name="tome_core",
        )
    sys.path.append(root)  # last, so that nothing of ours hides a module of the host
    return importlib.import_module("tome_core.hosting")


hosting = _find()
