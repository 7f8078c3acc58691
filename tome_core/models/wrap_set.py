"""All wraps on one model: which patch they serve, the calls that go on, and how they come off again."""

from __future__ import annotations

import threading
import weakref
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from ..engine.decision import Call
from .wrap import Wrap, patch_lock

_MARK = "_tome_core_patch"
_RESTING: weakref.WeakKeyDictionary[nn.Module, WrapSet] = weakref.WeakKeyDictionary()
_OF_ANOTHER_PATCH = (
    "gradient checkpointing runs a call again that was merged by another patch: call backward() before a patch is "
    "put on or taken off, or turn checkpointing off"
)


class Calls(threading.local):
    """Of one model, in each thread. in_graph: the latest that a graph has begun; off: nothing is to merge."""

    now: Call | None = None
    in_graph: Call | None = None
    off = 0


class WrapSet:
    """The wraps of one model, and what they share.

    handle: the patch in force. While there is none the wraps rest, holding no module, and the next patch gets the same
    objects: a compiled model knows them. adapter: reads the model's calls. begun: while a compiler traces the model's
    own call, what its attentions are told of it, or why it is left alone.
    """

    def __init__(self) -> None:
        self.adapter: Any = None
        self.handle: Any = None
        self.begun: torch.Tensor | str | None = None
        self.calls = Calls()
        self._goes_back: Call | None = None  # whose backward pass goes on
        self._on: list[Wrap] = []
        self._off: dict[tuple[type, int], Wrap] = {}

    def change(self, model: nn.Module, adapter: Any, handle: Any, levels: set[int], around: set[int]) -> None:
        """Have what this patch needs, and nothing else; it is not put on yet."""
        self.adapter, self.handle = adapter, handle
        self._off |= {(type(one), id(one.target)): one for one in self._on}
        wraps = list(adapter.wraps(model, levels, around, self._reuse_or_make))
        for wrap in reversed([one for one in self._on if one not in wraps]):
            wrap.uninstall()
        self._off = {key: one for key, one in self._off.items() if one.target is None}  # others hold their module
        self._on = wraps

    def _reuse_or_make(self, kind: type[Wrap], module: nn.Module, *facts: Any) -> Wrap:
        found = self._off.pop((kind, id(module)), None)
        return found if found is not None and found.wrapped() is module else kind(module, self, *facts)

    def put_back(self) -> None:
        """Have all wraps on top of what others have put on the model."""
        self._on = [wrap.install() for wrap in self._on]

    def take_off(self) -> None:
        """Leave the model as it was found; again if an interrupt has come in between."""
        for wrap in reversed(self._on):
            target = wrap.target
            wrap.uninstall()
            if target is not None and wrap.target is None:  # it rests
                self._off[type(wrap), id(target)] = wrap
        self._on, self.handle = [], None

    def is_called(self) -> bool:
        """Is this thread inside a call of the model?"""
        return self.calls.now is not None or self.calls.off > 0

    def follow_back(self, now: Call | None, out: Any) -> None:
        """A call has ended, None if it merged nothing. Gradient checkpointing repeats blocks in its backward pass."""

        def note(_: torch.Tensor) -> None:
            self._goes_back = now
            torch.autograd.Variable._execution_engine.queue_callback(partial(setattr, self, "_goes_back", None))

        for one in tree_flatten(out)[0]:
            if torch.is_tensor(one) and one.requires_grad:
                one.register_hook(note)

    def resumed(self) -> Call | None:
        """The call of which a part runs by itself: a compiled one in several graphs, or one that checkpointing repeats.

        Raises RuntimeError if another patch has merged that.
        """
        if torch.is_tensor(self.begun):
            return self.calls.in_graph
        now = self._goes_back
        if now is not None and now.state is not self.handle:
            raise RuntimeError(_OF_ANOTHER_PATCH)
        return now

    def look_after_itself(self, level: int) -> None:
        """An attention runs outside of any call: if another program has taken the model's wrap off, as DeepCache does
        when it goes, it is put back for the next call.
        """
        if self.handle is not None and not self.calls.off and self._on and not self._on[0].is_on_top():
            self.put_back()
            why = "another program had taken the patch off the model; it is on again"
            self.handle.leave_alone(None, level, why, 0, 0, 0)

    def __reduce__(self) -> tuple:
        return type(None), ()  # a copy of a patched model merges nothing


def wraps_on(model: nn.Module | None) -> WrapSet | None:
    """The wraps of the patch in force on the model; None if there is none."""
    return None if model is None else vars(model).get(_MARK)


def put_on(model: nn.Module, adapter: Any, handle: Any, levels: set[int], around: set[int]) -> Any:
    """Put the handle's wraps on the model. Returns the handle that was in force before."""
    with patch_lock:
        found = wraps_on(model)
        if found is None:
            found = vars(model)[_MARK] = _RESTING.pop(model, None) or WrapSet()
        before = found.handle
        try:
            if before is not handle:  # hosts put it on at each step, and a walk over the model takes a while
                found.change(model, adapter, handle, levels, around)
            found.put_back()
        except BaseException:
            take_off(model, handle)
            raise
        return before


def take_off(model: nn.Module, handle: Any) -> None:
    """Take the handle's wraps off the model, if it is in force there."""
    with patch_lock:
        found = wraps_on(model)
        if found is not None and found.handle is handle:
            found.take_off()
            vars(model).pop(_MARK, None)
            _RESTING[model] = found


def drop_mark(module: nn.Module) -> None:
    """Take off what a copy of a patched model has brought along, or an interrupt has left."""
    if getattr(wraps_on(module), "handle", None) is None:
        vars(module).pop(_MARK, None)


def forget_all() -> None:
    """Let go of what rests, for whoever unloads this copy of the engine."""
    _RESTING.clear()
