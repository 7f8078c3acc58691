"""Calls of install.py as users make them, folders like a host's, and ComfyUI's way to load a pack."""

import importlib.util
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import install_hosts as install

ROOT = Path(__file__).parents[2]


def call_install(*arguments: object, cwd: Path = ROOT, options: Sequence[str] = ()) -> subprocess.CompletedProcess:
    """Run install.py. options: Python's options."""
    command = [sys.executable, *options, str(ROOT / "install.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd)


def make_folder(host: install.Host, parent: Path) -> Path:
    """A folder like the host's, whose path cannot become a module name."""
    folder = parent / "a host v0.33.0"
    folder.mkdir()
    for name in host.looked_for[0]:
        if name.endswith(".py"):
            (folder / name).touch()
        else:
            (folder / name).mkdir(parents=True)
    return folder


def load_pack(folder: Path) -> ModuleType:
    """Load a pack by ComfyUI's rule: the folder's path with dots replaced is the module's name in sys.modules."""
    name = str(folder).replace(".", "_x_")
    spec = importlib.util.spec_from_file_location(name, folder / "__init__.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
