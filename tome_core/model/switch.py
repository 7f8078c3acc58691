"""Which patch merges in the next call of a UNet, and the call that goes on.

Wraps stay on a UNet while anybody holds them; this object tells them whose settings are in force, if anybody's. It
lives as long as its UNet, patched or not, and holds no module.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..compiling import compiles_here


class Inside(threading.local):
    """Whether this thread is inside a call of any UNet. depth: of merged ones; plain: of those that merge nothing."""

    depth = 0
    plain = 0


inside = Inside()


class Switch:
    """The state that all wraps of one UNet share.

    run: of the patch that merges wherever nobody else is named; None: nobody's. named: (thread, run) of those who are
    named for a time, the latest last. call, grid, block: of the call that goes on, which belongs to the thread that
    ``call`` names; each site puts back what it found, so that calls inside of calls see their own.
    lock: held by the thread that is inside a merged call. later: what could not wait for the call that goes on.
    resting: the wiring, while it is not on the UNet; it holds no module then.
    """

    def __init__(self) -> None:
        self.run: Any = None
        self.named: list[tuple[int, Any]] = []
        self.call: Any = None
        self.grid: Any = None
        self.block: Any = None
        self.lock = threading.RLock()
        self.later: list[Callable[[], None]] = []
        self.resting: Any = None

    def current(self) -> Any:
        """The run in force in this thread, or None. A compiler sees no threads."""
        if self.named:
            if torch.compiler.is_compiling() and compiles_here():
                return self.named[-1][1]
            thread = threading.get_ident()
            for named, run in reversed(self.named):
                if named == thread:
                    return run
        return self.run

    @contextmanager
    def naming(self, run: Any) -> Iterator[None]:
        """While in here, this thread's calls of the UNet are this run's."""
        entry = (threading.get_ident(), run)
        self.named.append(entry)
        try:
            yield
        finally:
            self.named.remove(entry)

    @contextmanager
    def between_calls(self) -> Iterator[bool]:
        """While no other thread is inside a merged call of the UNet; waits for it.

        A thread that is itself inside a call of some other UNet must not wait, because that one's may wait for it:
        it gets False where somebody is inside.
        """
        free = self.lock.acquire(blocking=not inside.depth)
        try:
            yield free
        finally:
            if free:
                self.lock.release()

    def __getstate__(self) -> dict[str, Any]:
        state = {**vars(self), "named": [], "call": None, "grid": None, "block": None, "later": [], "resting": None}
        del state["lock"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, lock=threading.RLock())


_OF_UNET: weakref.WeakKeyDictionary[nn.Module, Switch] = weakref.WeakKeyDictionary()
_guard = threading.RLock()


def patch_lock() -> threading.RLock:
    """Held while anybody changes what is on a model: two threads may patch one."""
    return _guard


def switch_of(unet: nn.Module) -> Switch:
    """The UNet's own, from the first time on that somebody asks until the UNet is gone."""
    with patch_lock():
        return _OF_UNET.setdefault(unet, Switch())


def adopt(unet: nn.Module, switch: Switch) -> None:
    """Make it the UNet's own: a copy of a patched UNet brings a copy of the switch along."""
    with patch_lock():
        _OF_UNET[unet] = switch


def let_go() -> None:
    """Forget what rests on any UNet, for whoever unloads this copy of the engine.

    Torch holds the operators of a process's first copy for ever, and by way of them what rests on a UNet still loaded.
    """
    with patch_lock():
        _OF_UNET.clear()
