"""Several works in threads at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


def at_once(*works: Callable[[], Any]) -> list[Any]:
    """What each of them gives, run in a thread each from the same moment on; raises what one of them raised."""
    start, results = threading.Barrier(len(works)), [None] * len(works)

    def run(place: int, work: Callable[[], Any]) -> None:
        start.wait()
        try:
            results[place] = work()
        except BaseException as error:
            results[place] = error

    threads = [threading.Thread(target=run, args=one) for one in enumerate(works)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one in results:
        if isinstance(one, BaseException):
            raise one
    return results
