"""How much of the finest self-attention is left, counted where every method has to pass, and the time of calls.

In a UNet those are its projections. In a transformer queries and keys merge behind these, so there it is torch's
attention function.

Time is processor time of a network's calls while pictures are made, beside that of the same calls without merging. Both
are taken in turns of a few seconds, so that what slows the machine slows both. Host-side work of a patch counts.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from benchmarks.networks import TRANSFORMER, finest_blocks, kind_of, take_apart
from tome_core.models.transformer_layouts import family_of, find_attentions

_SAMPLE = 1 / 5  # of its tokens: who answers fewer does so to correct the others by, and no count is of that
BESIDE = 3  # unmerged calls after each picture


class Work:
    """Queries times keys. full: of all tokens that reached the blocks; left: of those that were attended.

    Both grow with every call inside the context. May be entered again, before what is put on the network.
    """

    def __init__(self) -> None:
        super().__init__()
        self.full = self.left = 0

    def share(self) -> float:
        """Work left, as a share of the whole, since the last call of this method."""
        share = self.left / self.full
        self.full = self.left = 0
        return share

    def __enter__(self) -> Work:
        self._hooks = self._hook()
        return self

    def __exit__(self, *error: object) -> None:
        for hook in self._hooks:
            hook.remove()


def counting(network: nn.Module) -> Work:
    """A context manager that counts, whatever has patched the network."""
    return _OfSequence(network) if kind_of(network) == TRANSFORMER else _OfProjections(network)


class _OfProjections(Work):
    """Of a UNet's finest level."""

    def __init__(self, unet: nn.Module) -> None:
        super().__init__()
        self.blocks = [place.block for place in finest_blocks(unet)]
        self._tokens: dict[nn.Module, int] = {}  # of a projection's latest call

    def _hook(self) -> list:
        hooks = []
        for block in self.blocks:
            attention = block.attn1
            # a method that compares keys calls to_k before the attention does; the last call is the attention's
            noted = [one.register_forward_hook(self._note) for one in (attention.to_q, attention.to_k)]
            last = attention.to_out[0].register_forward_hook(partial(self._add_left, attention))
            hooks += [block.register_forward_pre_hook(self._add_full), *noted, last]
        return hooks

    def _add_full(self, block: nn.Module, args: tuple) -> None:
        self.full += args[0].shape[0] * args[0].shape[1] ** 2

    def _note(self, projection: nn.Module, args: tuple, out: torch.Tensor) -> None:
        self._tokens[projection] = out.shape[1]

    def _add_left(self, attention: nn.Module, projection: nn.Module, args: tuple, out: torch.Tensor) -> None:
        self.left += out.shape[0] * self._tokens[attention.to_q] * self._tokens[attention.to_k]


class _OfSequence(Work, TorchFunctionMode):
    """Of a transformer all of whose attentions are over one sequence, as Flux's are; of those too that a call skips."""

    def __init__(self, transformer: nn.Module) -> None:
        super().__init__()
        self.transformer = transformer
        self.attentions = [one for _, one in find_attentions(transformer, family_of(transformer))]
        self._batch, self._tokens = 0, 0  # that reached the attention which is called
        self._inside = False

    def __enter__(self) -> Work:
        TorchFunctionMode.__enter__(self)
        return Work.__enter__(self)

    def __exit__(self, *error: object) -> None:
        Work.__exit__(self)
        TorchFunctionMode.__exit__(self, *error)

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is F.scaled_dot_product_attention and self._inside:
            (q, k, _), _ = take_apart(args, kwargs or {})
            if q.shape[2] >= _SAMPLE * self._tokens:
                self.left += q.shape[0] * q.shape[2] * k.shape[2]
        return func(*args, **(kwargs or {}))

    def _hook(self) -> list:
        hooks = [self.transformer.register_forward_hook(self._add_full)]
        for attention in self.attentions:
            hooks.append(attention.register_forward_pre_hook(self._begin, with_kwargs=True))
            hooks.append(attention.register_forward_hook(self._end))
        return hooks

    def _begin(self, attention: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        sequences = [one for one in (*args, kwargs.get("hidden_states"), kwargs.get("encoder_hidden_states"))
                     if torch.is_tensor(one)]  # fmt: skip
        self._batch, self._tokens = len(sequences[0]), sum(one.shape[1] for one in sequences)
        self._inside = True

    def _end(self, attention: nn.Module, args: tuple, out: Any) -> None:
        self._inside = False

    def _add_full(self, transformer: nn.Module, args: tuple, out: Any) -> None:
        self.full += len(self.attentions) * self._batch * self._tokens**2


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

    def time_unmerged(self) -> float:
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
