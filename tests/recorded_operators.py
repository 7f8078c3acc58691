"""A stand-in for CUDA graphs on a CPU: the operators of one call are recorded, and the same ones run again.

Each replay runs the recorded operators on the recorded tensors, so whatever Python decided stays decided, and whatever
is not written into those tensors is not seen, as in a graph. What would wait for the device raises while it records.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tome_core.graphs.handle import capture_by

WAITS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::masked_select", "aten::is_nonzero"}
READS = (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__)


class RecordedOperators:
    """recorded: how many calls; replays: how often they were made again."""

    def __init__(self) -> None:
        self.recorded = self.replays = 0

    def why_not(self, latent: torch.Tensor) -> str:
        return ""

    def warm_up(self, call: Callable[[], Any]) -> None:
        call()

    def record(self, call: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        recorder = _Recorder()
        with _NoReads(), recorder:
            out = call()
        recorder.undo()
        self.recorded += 1

        def replay() -> None:
            self.replays += 1
            recorder.replay()

        return replay, out

    def in_turn(self, device: torch.device) -> AbstractContextManager[None]:
        return nullcontext()


class _NoReads(TorchFunctionMode):
    """Values that are read without an operator."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in READS:
            raise RuntimeError(f"{func.__name__} waits for the device")
        return func(*args, **(kwargs or {}))


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self._steps: list[tuple] = []
        self._made: set[int] = set()  # storages; what was made is held, so that no other comes to lie there
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func._schema.name in WAITS:
            raise RuntimeError(f"{func._schema.name} waits for the device")
        for tensor in _written(func, args, kwargs):
            place = tensor.untyped_storage().data_ptr()
            if place not in self._made and place not in self._before:
                self._before[place] = tensor, tensor.clone()
        out = func(*args, **kwargs)
        given = {_place(one) for one in tree_leaves((args, kwargs)) if torch.is_tensor(one)}
        self._made |= {_place(one) for one in tree_leaves(out) if torch.is_tensor(one)} - given
        self._steps.append((func, args, kwargs, out))
        return out

    def undo(self) -> None:
        """A graph that is recorded has not run: what others see of it is as before."""
        with torch.inference_mode():
            for tensor, value in self._before.values():
                tensor.copy_(value)

    def replay(self) -> None:
        with torch.inference_mode():
            for func, args, kwargs, out in self._steps:
                again = func(*args, **kwargs)
                for old, new in zip(tree_leaves(out), tree_leaves(again), strict=True):
                    if torch.is_tensor(old) and _place(old) != _place(new):
                        old.copy_(new)


def _place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _written(func: Any, args: tuple, kwargs: dict) -> Iterator[torch.Tensor]:
    for number, one in enumerate(func._schema.arguments):
        if one.alias_info is not None and one.alias_info.is_write:
            value = args[number] if number < len(args) else kwargs.get(one.name)
            yield from (leaf for leaf in tree_leaves(value) if torch.is_tensor(leaf))


def recorded(model, **more):
    """Captured by the stand-in, which is at ``backend``."""
    backend = RecordedOperators()
    handle = capture_by(model, backend, **more)
    handle.backend = backend
    return handle


def kinds(graphs) -> list[str]:
    return [kind for kind, _ in graphs.graphs]


def counts(handle):
    report = handle.report()
    return report.calls, report.levels


def first_block(model):
    return model.input_blocks[0][0].transformer_blocks[0]
