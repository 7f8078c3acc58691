"""The webui's entry point if this repository is in `extensions/`. The code is in `extension/`."""
# run again at every Reload UI; the webui registers each subclass of its Script that this file defines

import importlib
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "_tome_core_webui"  # private, because other extensions may use the names `extension` and `tome_core`


def load():
    """Return the module `extension.script`, imported below a private package; None if another copy is loaded."""
    parent = sys.modules.get(PACKAGE)
    if parent is None:
        parent = sys.modules[PACKAGE] = ModuleType(PACKAGE)
        parent.__path__ = [str(ROOT)]
    if parent.__path__ != [str(ROOT)]:
        print(f"ToMe: {ROOT} is not used, because the extension is installed twice; remove it or {parent.__path__[0]}")
        return None
    return importlib.import_module(f"{PACKAGE}.extension.script")


entry = load()
if entry is not None:
    TokenMergingScript = entry.register()
