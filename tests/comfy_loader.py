"""How ComfyUI loads a pack. Needs nothing but the standard library."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def load_pack(folder: Path) -> ModuleType:
    """ComfyUI's rule: the module's name is the folder's path with every dot replaced, and it stays in sys.modules."""
    name = str(folder).replace(".", "_x_")
    spec = importlib.util.spec_from_file_location(name, folder / "__init__.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
