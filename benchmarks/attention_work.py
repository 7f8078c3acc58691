"""How much of the finest self-attention is left, counted where every method has to pass, and the time of calls.

That is torch's attention function.

Time is processor time of a network's calls while pictures are made, beside that of the same calls without merging. Both
are taken in turns of a few seconds, so that what slows the machine slows both. Host-side work of a patch counts.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch
from torch import nn

from benchmarks.networks import TRANSFORMER, InPlaceOfAttention, finest_blocks, kind_of, take_apart
from tome_core.attention.functions import _TOKENS as TRIED
from tome_core.models.transformer import family_of, find_attentions

BESIDE = 3  # unmerged calls after each picture


class Work(InPlaceOfAttention):
    """Queries times keys. full: of all tokens that reached the attentions; left: of those that were attended.

    Both grow with every call inside the context. May be entered again, before what is put on the network.
    """

    def __init__(self, attentions: list[nn.Module]) -> None:
        self.attentions = attentions
        self.full = self.left = 0
        self._inside = False

    def share(self) -> float:
        """Work left, as a share of the whole, since the last call of this method."""
        share = self.left / self.full
        self.full = self.left = 0
        return share

    def __enter__(self) -> Work:
        self._hooks = self._hook()
        for attention in self.attentions:
            self._hooks.append(attention.register_forward_pre_hook(self._begin, with_kwargs=True))
            self._hooks.append(attention.register_forward_hook(self._end))
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        for hook in self._hooks:
            hook.remove()

    def attend(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Count, and do as torch does."""
        (q, k, _), _ = take_apart(args, kwargs)
        is_tried = (q.shape[0], q.shape[2], k.shape[2]) == (1, TRIED, TRIED)  # by the engine, which it does once
        if self._inside and not is_tried:
            self.left += q.shape[0] * q.shape[2] * k.shape[2]
        return self.own(*args, **kwargs)

    def _hook(self) -> list:
        """What counts `full`."""
        raise NotImplementedError

    def _begin(self, attention: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        self._inside = True

    def _end(self, attention: nn.Module, args: tuple, out: Any) -> None:
        self._inside = False


def counting(network: nn.Module) -> Work:
    """A context manager that counts, whatever has patched the network."""
    return _OfSequence(network) if kind_of(network) == TRANSFORMER else _OfBlocks(network)


class _OfBlocks(Work):
    """Of a UNet's finest level."""

    def __init__(self, unet: nn.Module) -> None:
        self.blocks = [place.block for place in finest_blocks(unet)]
        super().__init__([block.attn1 for block in self.blocks])

    def _hook(self) -> list:
        return [block.register_forward_pre_hook(self._add_full) for block in self.blocks]

    def _add_full(self, block: nn.Module, args: tuple) -> None:
        self.full += args[0].shape[0] * args[0].shape[1] ** 2


class _OfSequence(Work):
    """Of a transformer all of whose attentions are over one sequence, as Flux's are; of those too that a call skips."""

    def __init__(self, transformer: nn.Module) -> None:
        super().__init__([one for _, one in find_attentions(transformer, family_of(transformer))])
        self.transformer = transformer
        self._batch, self._tokens = 0, 0  # that reached the attention which was called last

    def _hook(self) -> list:
        return [self.transformer.register_forward_hook(self._add_full)]

    def _begin(self, attention: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        super()._begin(attention, args, kwargs)
        sequences = [one for one in (*args, kwargs.get("hidden_states"), kwargs.get("encoder_hidden_states"))
                     if torch.is_tensor(one)]  # fmt: skip
        self._batch, self._tokens = len(sequences[0]), sum(one.shape[1] for one in sequences)

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
