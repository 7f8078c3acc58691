"""All wraps on one model, which patch they serve, and how they come off again."""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn

from .sites import Shared
from .wrap import Wrap, patch_lock

_MARK = "_tome_core_patch"
_RESTING: weakref.WeakKeyDictionary[nn.Module, WrapSet] = weakref.WeakKeyDictionary()


class WrapSet:
    """The wraps of one model. handle: the patch in force, None while they rest.

    They rest when no patch is in force, holding no module, and the next patch gets the same objects: a compiled model
    knows them.
    """

    def __init__(self, adapter: Any) -> None:
        self.shared = Shared(adapter)
        self._on: list[Wrap] = []
        self._off: dict[tuple[type, int], Wrap] = {}

    @property
    def handle(self) -> Any:
        """The patch in force on the model."""
        return self.shared.state

    def put_on(self, model: nn.Module, adapter: Any, handle: Any, levels: set[int], around: set[int]) -> None:
        """Have on what this patch needs, and nothing else, on top of what others have put on the model."""
        shared = self.shared
        if shared.state is handle:  # hosts put it on at each step, and a walk over the model takes a while
            self._put_back()
            return
        shared.adapter, shared.state, shared.put_back = adapter, handle, self._put_back
        before = {(type(one), id(one.target)): one for one in self._on}
        self._off |= before
        wraps = list(adapter.wraps(model, shared, levels, around, self._reuse_or_make))
        for wrap in reversed([one for one in self._on if one not in wraps]):
            wrap.uninstall()
        self._off = {key: one for key, one in self._off.items() if one.target is None}  # others hold their module
        self._on = wraps
        self._put_back()

    def _put_back(self) -> None:
        self._on = [wrap.install() for wrap in self._on]

    def _reuse_or_make(self, kind: type[Wrap], module: nn.Module, *facts: Any) -> Wrap:
        found = self._off.pop((kind, id(module)), None)
        return found if found is not None and found.wrapped() is module else kind(module, *facts)

    def take_off(self) -> None:
        """Leave the model as it was found; again, where an interrupt has come in between."""
        for wrap in reversed(self._on):
            target = wrap.target
            wrap.uninstall()
            if target is not None and wrap.target is None:  # it rests
                self._off[type(wrap), id(target)] = wrap
        self._on = []
        self.shared.forget()

    def is_called(self) -> bool:
        """Is this thread inside a call of the model?"""
        return self.shared.calls.now is not None or self.shared.calls.off > 0

    def __reduce__(self) -> tuple:
        return type(None), ()  # a copy of a patched model merges nothing

    def __deepcopy__(self, memo: dict) -> None:
        return None


def wraps_on(model: nn.Module | None) -> WrapSet | None:
    """The wraps of the patch in force on the model; None if there is none."""
    return None if model is None else vars(model).get(_MARK)


def put_on(model: nn.Module, adapter: Any, handle: Any, levels: set[int], around: set[int]) -> Any:
    """Put the handle's wraps on the model. Returns the handle that was in force before."""
    with patch_lock:
        found = wraps_on(model)
        if found is None:
            found = vars(model)[_MARK] = _RESTING.pop(model, None) or WrapSet(adapter)
        before = found.handle
        try:
            found.put_on(model, adapter, handle, levels, around)
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
