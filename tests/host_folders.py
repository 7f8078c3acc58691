"""install.py called as people call it, and folders like a host's."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import install_hosts as install

ROOT = Path(__file__).parents[1]


def call_install(
    *arguments: object, cwd: Path = ROOT, options: Sequence[str] = ()
) -> subprocess.CompletedProcess:
    """options: Python's."""
    command = [sys.executable, *options, str(ROOT / "install.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd)


def make_folder(host: install.Host, parent: Path) -> Path:
    """A folder like the host's, in a path that no module name could be made of."""
    made = parent / "a host v0.33.0"
    for name in host.looked_for[0]:
        if name.endswith(".py"):
            made.mkdir(exist_ok=True)
            (made / name).touch()
        else:
            (made / name).mkdir(parents=True)
    return made
