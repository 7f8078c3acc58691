"""An environment with a webui's gradio, made once, and the page of app.py served by it; servers of other tests too."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
import venv
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import install

HERE = Path(__file__).parent
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy would not find this machine


def environment(folder: Path, pins: Path) -> Path:
    """The interpreter of an environment in `folder` that has what the file `pins` lists, and nothing of this one.

    The second call needs no pip. Raises install.Failure if it cannot be made.
    """
    python, stamp = install.venv_python(folder), folder / "installed.txt"
    mark = sys.version + pins.read_text(encoding="utf-8")
    if not stamp.exists() or stamp.read_text(encoding="utf-8") != mark:
        shutil.rmtree(folder, ignore_errors=True)
        venv.create(folder, symlinks=os.name != "nt")
        # --only-binary: on a Python too new for the webui's pins, say so instead of compiling numpy; --no-compile: what
        # is imported is compiled then, a small part of it
        command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--disable-pip-version-check",
                   "--only-binary=:all:", "--no-compile", "-r", str(pins)]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise install.Failure(f"pip could not install {pins.name}: {done.stderr[-300:]}")
        stamp.write_text(mark, encoding="utf-8")
    return python


def free_port() -> int:
    """Of this machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@contextlib.contextmanager
def running(command: Sequence[str], log: Path, is_ready: Callable[[], bool], **options: Any) -> Iterator[None]:
    """A server that writes a log, from when it is ready to the end of the block, with all that it started.

    AssertionError with its last words if it ends by itself.
    """
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True, **options)
    try:
        while not is_ready():
            assert process.poll() is None, f"it ended by itself:\n{log.read_text(errors='replace')[-4000:]}"
            time.sleep(0.5)
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


@contextlib.contextmanager
def serve(python: Path, log: Path) -> Iterator[str]:
    """The address of the page; its server ends with the block."""
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    # -I: nothing of this environment but the torch that is asked for
    command = [str(python), "-I", str(HERE / "app.py"), str(port), str(Path(torch.__file__).parents[1])]
    quiet = {"GRADIO_ANALYTICS_ENABLED": "False", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "no_proxy": "*"}
    with running(command, log, lambda: answers(address), env={**os.environ, **quiet}):
        yield address


def answers(address: str) -> bool:
    with contextlib.suppress(OSError), OPENER.open(address):
        return True
    return False


def wait_until_ready(address: str, process: subprocess.Popen) -> None:
    while not answers(address):
        assert process.poll() is None, "the page's server ended by itself"
        time.sleep(0.2)
