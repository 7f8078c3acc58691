"""Servers on this machine, for the tests of pages and of real hosts."""

import contextlib
import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy would not find this machine


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@contextlib.contextmanager
def running(command: Sequence[str], log: Path, is_ready: Callable[[], bool], **options: Any) -> Iterator[None]:
    """Run a server from its readiness to the block's end; assert that it does not end by itself, or show its log."""
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


def answers(address: str) -> bool:
    with contextlib.suppress(OSError), OPENER.open(address):
        return True
    return False


def wait_until_ready(address: str, process: subprocess.Popen) -> None:
    while not answers(address):
        assert process.poll() is None, "the page's server ended by itself"
        time.sleep(0.2)
