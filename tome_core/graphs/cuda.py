"""CUDA graphs as torch has them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


class CudaGraphs:
    """Records calls into graphs that share a pool of memory. They are replayed one at a time, and what one returns is
    copied before the next, so that they may use the same memory in turns.
    """

    def __init__(self) -> None:
        self._pool: Any = None
        # of each device one to warm up and one to record in; they stay: libraries take memory for each that they see
        self._streams: dict[int, tuple[torch.cuda.Stream, torch.cuda.Stream]] = {}
        self._done: torch.cuda.Event | None = None

    def why_not(self, latent: torch.Tensor) -> str:
        """Why calls with such latents cannot be recorded, "" where they can."""
        if latent.device.type != "cuda":
            return f"its latents are on {latent.device.type}, and graphs are CUDA's; move it to a CUDA device"
        if torch.cuda.is_current_stream_capturing():
            return "somebody else's graph is being recorded around it"
        return ""

    @contextmanager
    def in_turn(self, device: torch.device) -> Iterator[None]:
        """Inside it the device waits for the call before, which may have been another stream's."""
        with torch.cuda.device(device):
            stream = torch.cuda.current_stream()
            if self._done is not None:
                stream.wait_event(self._done)
            try:
                yield
            finally:
                self._done = stream.record_event()

    def warm_up(self, call: Callable[[], Any]) -> None:
        """In a stream aside, as torch wants it: kernels are compiled and chosen, and libraries take their memory."""
        here, (aside, _) = torch.cuda.current_stream(), self._streams_here()
        aside.wait_stream(here)
        with torch.cuda.stream(aside):
            call()
        here.wait_stream(aside)

    def record(self, call: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """What makes the call again, at the same addresses, and what it returns, which is written anew then.

        The call itself is not made. Other threads may go on meanwhile.
        """
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph, (_, stream) = torch.cuda.CUDAGraph(), self._streams_here()
        with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
            out = call()
        return graph.replay, out

    def _streams_here(self) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
        device = torch.cuda.current_device()
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(), torch.cuda.Stream()
        return self._streams[device]
