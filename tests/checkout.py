"""A copy of the project as a newcomer has it: what git would give, and nothing that lies beside it here."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def fresh(folder: Path) -> Path:
    """The project's files as they are now, committed or not, in `folder`; an environment made there stays."""
    wanted = {path.as_posix() for path in tracked("--others", "--exclude-standard") or ()}
    if not wanted:
        pytest.skip("needs git's list of the project's files")
    for old in folder.rglob("*"):
        inside = old.relative_to(folder)
        if inside.parts[0] != ".venv" and not old.is_dir() and inside.as_posix() not in wanted:
            old.unlink()
    for name in wanted:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name)
    return folder


def tracked(*more: str) -> list[Path] | None:
    """The repository's files, relative to its root; None where git does not know it. more: what git lists beside."""
    # a checkout may belong to another user, as in a container
    command = ["git", "-c", "safe.directory=*", "-C", str(ROOT), "ls-files", "--cached", *more, "-z"]
    try:
        done = subprocess.run(command, capture_output=True, check=False)
    except OSError:
        return None
    paths = [Path(name) for name in done.stdout.decode().split("\0") if name and (ROOT / name).is_file()]
    return sorted(paths, key=lambda path: path.as_posix()) if done.returncode == 0 and paths else None


def kept(config: pytest.Config, otherwise: Path) -> Path:
    """The copy that all tests share, where pytest may keep things; else one in the folder `otherwise`."""
    cache = getattr(config, "cache", None)  # pytest can be told to have none
    return fresh((cache.mkdir("checkout") if cache else otherwise) / "repository")


def end(process: subprocess.Popen) -> None:
    """End a command that was started with start_new_session, and whatever it started itself; not on Windows."""
    with contextlib.suppress(ProcessLookupError):  # it has ended, and all that it started
        os.killpg(process.pid, signal.SIGTERM)
