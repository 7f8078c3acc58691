"""A copy of the project as a newcomer has it: only the files that git knows."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def tracked() -> list[str]:
    """The project's files as they are now, committed or not, relative to its root."""
    # a checkout may belong to another user, as in a container
    command = ["git", "-c", "safe.directory=*", "-C", str(ROOT), "ls-files", "--cached", "--others",
               "--exclude-standard", "-z"]  # fmt: skip
    try:
        listed = subprocess.run(command, capture_output=True, check=True).stdout.decode().split("\0")
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs git's list of the project's files")
    return [name for name in listed if name and (ROOT / name).is_file()]


def fresh(folder: Path) -> Path:
    """Make a copy in `folder`; an environment made there stays."""
    wanted = tracked()
    for old in folder.rglob("*"):
        inside = old.relative_to(folder)
        if inside.parts[0] != ".venv" and not old.is_dir() and inside.as_posix() not in wanted:
            old.unlink()
    for name in wanted:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name)
    return folder
