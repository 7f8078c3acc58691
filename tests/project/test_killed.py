"""A process that is killed in mid-render leaves no file behind, and the next start draws what any start draws."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import install

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
HOSTS = {"webui": install.WEBUI, "comfyui": install.COMFYUI}


def files(folder: Path) -> dict[str, bytes]:
    """Every file below, and what is in it."""
    return {str(path.relative_to(folder)): path.read_bytes()
            for path in sorted(folder.rglob("*")) if path.is_file()}  # fmt: skip


def start(host: str, world: Path, *more: str) -> subprocess.Popen:
    """A render whose home, temporary folder and place in the file system are all below ``world``."""
    home, temporary = world / "home", world / "temporary"
    variables = {"HOME": home, "TMPDIR": temporary, "XDG_CACHE_HOME": home, "PYTHONPATH": ROOT, "HF_HOME": home}
    environment = {**os.environ, **{name: str(path) for name, path in variables.items()},
                   "PYTHONDONTWRITEBYTECODE": "1"}  # fmt: skip
    command = [sys.executable, "-m", "tests.a_render", host, str(world / "repository"), *more]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=home, env=environment)


def read_until(render: subprocess.Popen, line: str) -> list[str]:
    """Its pictures and steps up to this line, or to its end."""
    said = []
    for one in iter(render.stdout.readline, ""):
        if one.startswith(("picture ", "step ")):  # not our log
            said.append(one.strip())
        if one.strip() == line:
            break
    return said


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="this system knows no kill that cannot be caught")
@pytest.mark.parametrize("host", HOSTS)
def test_a_killed_render_leaves_nothing_that_changes_the_next_start(host: str, tmp_path: Path):
    for name in ("home", "temporary"):
        (tmp_path / name).mkdir()
    install.put(HOSTS[host], tmp_path / "repository", copy=True)
    before = files(tmp_path)
    killed = start(host, tmp_path, "2")
    first = read_until(killed, "step 2")
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert killed.returncode == -signal.SIGKILL and first[2:] == ["step 0", "step 1", "step 2"]
    assert files(tmp_path) == before
    after = start(host, tmp_path)
    assert read_until(after, "its end") == first[:2] and len(set(first[:2])) == 2
    assert after.wait() == 0 and files(tmp_path) == before
