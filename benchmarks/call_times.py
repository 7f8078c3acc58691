"""Processor time of a network's calls while pictures are made, beside that of the same calls without merging.

Both are taken in turns of a few seconds, so that what slows the machine slows both. Host-side work of a patch counts.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median

import torch
from torch import nn

BESIDE = 3  # unmerged calls after each picture


@contextmanager
def one_thread(wanted: bool) -> Iterator[None]:
    """Torch on one thread inside it, where `wanted`: the processor time of several counts their waiting."""
    before = torch.get_num_threads()
    torch.set_num_threads(1 if wanted else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class CallTimes:
    """A context manager: inside it the seconds of every call of the network are noted.

    Enter it before what patches the network: then its clock starts before the patch does anything.
    """

    def __init__(self, network: nn.Module) -> None:
        self.network = network
        self.seconds: list[float] = []
        self._latest: tuple[tuple, dict] = ((), {})
        self._hooks: list = []

    def __enter__(self) -> CallTimes:
        self.seconds = []
        self._hooks = [
            self.network.register_forward_pre_hook(self._start, with_kwargs=True, prepend=True),
            self.network.register_forward_hook(self._stop),
        ]
        return self

    def __exit__(self, *error: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def unmerged(self) -> float:
        """Seconds of the latest call's like without merging: the median of `BESIDE`. Call it outside of a patch."""
        arguments, named = self._latest
        found = []
        for _ in range(BESIDE):
            start = time.process_time()
            self.network(*arguments, **named)
            found.append(time.process_time() - start)
        return median(found)

    def _start(self, network: nn.Module, args: tuple, kwargs: dict) -> None:
        self._latest = args, kwargs
        self.seconds.append(-time.process_time())

    def _stop(self, network: nn.Module, args: tuple, out: object) -> None:
        self.seconds[-1] += time.process_time()
