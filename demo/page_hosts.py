"""What other hosts have that the page needs: the only place where the demo looks into a host.

The page writes a webui's payload, which has to follow that host's table when it grows, and draws merge maps as a node
does. Neither a webui nor ComfyUI is asked for.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import tome_core

ROOT = Path(__file__).resolve().parents[1]
_PACKAGE = "_tome_core_page"  # `extension` speaks to its engine as a neighbour, so it needs a package around it


def webui() -> ModuleType:
    """The module with the panel's `FIELDS` and `CHOICES`."""
    if _PACKAGE not in sys.modules:
        parent = sys.modules[_PACKAGE] = ModuleType(_PACKAGE)
        parent.__path__ = [str(ROOT)]
        # one engine: a part that was imported a second time would take the first one's place in the package
        engine = [name for name in sys.modules if f"{name}.".startswith(f"{tome_core.__name__}.")]
        sys.modules.update({f"{_PACKAGE}.{name}": sys.modules[name] for name in engine})
    return importlib.import_module(".extension.settings", _PACKAGE)


def merge_map() -> ModuleType:
    """The module whose `panel` draws which tokens became one."""
    return importlib.import_module("comfy_nodes.picture")


def custom(presets: Any) -> str:
    """The choice of a host's presets that takes the settings as they are given."""
    return next(one for one in presets if one.lower() == "custom")
