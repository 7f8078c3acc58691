"""Functions run in several threads at once."""

import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def at_once(*works: Callable[[], Any], interval: float = 0.005) -> list[Any]:
    """Run each in a thread, from the same moment; return their results, or raise. interval: seconds of a turn."""
    start, before = threading.Barrier(len(works)), sys.getswitchinterval()

    def run(work: Callable[[], Any]) -> Any:
        start.wait()
        return work()

    sys.setswitchinterval(interval)
    try:
        with ThreadPoolExecutor(len(works)) as threads:
            return list(threads.map(run, works))
    finally:
        sys.setswitchinterval(before)
