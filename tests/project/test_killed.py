"""A process that is killed in mid-render leaves no file behind, and the next start draws what any start draws."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import install_hosts

ROOT = Path(__file__).parents[2]


def files(folder: Path) -> dict[str, bytes]:
    """Every file below, and its content."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def start(host: str, world: Path, *last: str) -> subprocess.Popen:
    """A render whose home, temporary folder and place in the file system are all below ``world``."""
    home, temporary = world / "home", world / "temporary"
    variables = {"HOME": home, "TMPDIR": temporary, "XDG_CACHE_HOME": home, "PYTHONPATH": ROOT, "HF_HOME": home}
    environment = {**os.environ, **{name: str(path) for name, path in variables.items()},
                   "PYTHONDONTWRITEBYTECODE": "1"}  # fmt: skip
    command = [sys.executable, "-m", "tests.a_render", host, str(world / "repository"), *last]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=home, env=environment)


def read_until(render: subprocess.Popen, last: str) -> list[str]:
    """Its pictures and steps up to this line, or to its end; not our log."""
    lines = []
    for line in iter(render.stdout.readline, ""):
        lines += [line.strip()] * line.startswith(("picture ", "step "))
        if line.strip() == last:
            break
    return lines


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="this system knows no kill that cannot be caught")
@pytest.mark.parametrize("host", [install_hosts.WEBUI, install_hosts.COMFYUI], ids=lambda host: host.command)
def test_a_killed_render_leaves_nothing_that_changes_the_next_start(host: install_hosts.Host, tmp_path: Path):
    for name in ("home", "temporary"):
        (tmp_path / name).mkdir()
    install_hosts.put(host, tmp_path / "repository", copy=True)
    before = files(tmp_path)
    killed = start(host.command, tmp_path, "2")
    first = read_until(killed, "step 2")
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert killed.returncode == -signal.SIGKILL and first[2:] == ["step 0", "step 1", "step 2"]
    assert files(tmp_path) == before
    after = start(host.command, tmp_path)
    assert read_until(after, "its end") == first[:2] and len(set(first[:2])) == 2
    assert after.wait() == 0 and files(tmp_path) == before
