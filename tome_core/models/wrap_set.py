"""All wraps of one model, with the patch that they serve and the calls that run; how they get on it, and off it."""

from __future__ import annotations

import threading
import weakref
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from ..engine.decision import ModelCall
from ..faults import DeliberateError
from .outer_wrap import CODE, OuterWrap
from .wrap import Wrap, foreign_method_on, over_hook, patch_lock, why_missed

_SET_MARK = "_tome_core_patch"
_OF_ANOTHER_PATCH = (
    "gradient checkpointing runs a call again that was merged by another patch: call backward() before a patch is "
    "put on or taken off, or turn checkpointing off"
)
# How rules merge, by the number of each level in which they do. A value has "tomesd" if parts of blocks may be called
# with merged tokens, as by tomesd, and "blocks" if whole blocks may be.
Ways = dict[int, set[str]]
_RESTING: weakref.WeakKeyDictionary[nn.Module, WrapSet] = weakref.WeakKeyDictionary()


class Calls(threading.local):
    """The calls of one model in the current thread.

    Attributes:
        current: the call that is running; None outside of calls, and in calls that must not merge.
        in_graph: the latest call that a compiled graph began; None if that call must not merge.
        disabled: above 0 if calls must not merge, see `Patch.unmerged`.
        reason_missed: the reason why the latest call did not reach the model's wrap, or "".
    """

    current: ModelCall | None = None
    in_graph: ModelCall | None = None
    disabled, reason_missed = 0, ""


class WrapSet:
    """The wraps of one model, and the state that they share.

    `put_on` and `take_off` keep it up to date. Without a patch the wraps rest: they are off the model and hold no
    module. The next patch gets the same objects, because compiled models refer to them.

    Attributes:
        patch: the `Patch` in force, or None.
        adapter: the adapter that reads the model's calls.
        begun: while a compiler traces the model's own call, the result of the operator ``begin``, or the reason why
            the call does not merge; else None.
        paths: paths of the attentions that have a wrap.
        calls: the model's calls in each thread.
        wraps: the wraps on the model, the outermost first.
    """

    def __init__(self) -> None:
        self.paths: frozenset[str] = frozenset()
        self.adapter: Any = None
        self.patch: Any = None
        self.begun: torch.Tensor | str | None = None
        self.calls = Calls()
        self._backward_of: ModelCall | None = None  # the call whose backward pass is running
        self.wraps: list[Wrap] = []
        # the attributes of each block with an `OuterWrap`, and what was in the place of compiled code when it got it
        self._code: list[tuple[dict[str, Any], Any]] = []
        self._resting: dict[tuple[type, int], Wrap] = {}

    def change(self, model: nn.Module, adapter: Any, patch: Any, ways: Ways) -> None:
        """Set patch and adapter, choose the wraps that they need, for `put_back` to install, and uninstall others."""
        self.adapter, self.patch = adapter, patch
        self._resting |= {(type(wrap), id(wrap.target)): wrap for wrap in self.wraps}
        wraps = list(adapter.wraps(model, ways, self._reuse_or_make))
        for wrap in reversed([wrap for wrap in self.wraps if wrap not in wraps]):
            wrap.uninstall()
        # a wrap below another extension's wrapper still holds its module
        self._resting = {key: wrap for key, wrap in self._resting.items() if wrap.target is None}
        self.wraps, self.paths = wraps, frozenset(filter(None, (wrap.path for wrap in wraps)))

    def _reuse_or_make(self, kind: type[Wrap], module: nn.Module, *facts: Any) -> Wrap:
        """Return the wrap of this class that was kept for a module, or make one from module, this set and `facts`."""
        wrap = self._resting.pop((kind, id(module)), None)
        return wrap if wrap is not None and wrap.wrapped() is module else kind(module, self, *facts)

    def put_back(self) -> None:
        """Install all wraps, on top of the wrappers of other extensions. Idempotent."""
        self.wraps = [wrap.install() for wrap in self.wraps]
        self._note_code()

    def _note_code(self) -> None:
        """Note which blocks are compiled, for `follow_compilers`."""
        blocks = [vars(wrap.target) for wrap in self.wraps if isinstance(wrap, OuterWrap)]
        self._code = [(block, block.get(CODE)) for block in blocks]

    def follow_compilers(self) -> None:
        """Move the wraps of blocks that were compiled since they were installed, or that no longer are compiled."""
        for block, code in self._code:  # without a call of a function for each block
            if block.get(CODE) is not code:
                with patch_lock:
                    self.wraps = [wrap.install() if isinstance(wrap, OuterWrap) and wrap.has_to_move() else wrap
                                  for wrap in self.wraps]  # fmt: skip
                    self._note_code()
                return

    def take_off(self) -> None:
        """Uninstall all wraps, keep those released for the next patch, forget this patch; call again if interrupted."""
        for wrap in reversed(self.wraps):
            target = wrap.target
            wrap.uninstall()
            if target is not None and wrap.target is None:  # the wrap rests
                self._resting[type(wrap), id(target)] = wrap
        self.wraps, self._code, self.patch = [], [], None

    def prepare_backward(self, call: ModelCall | None, out: Any) -> None:
        """Prepare the backward pass of an ended call: blocks that gradient checkpointing runs again belong to it.

        None is for a call made without merging. `out` is the model's output, any nesting of tensors.
        """

        def note(_: torch.Tensor) -> None:
            self._backward_of = call
            torch.autograd.Variable._execution_engine.queue_callback(partial(setattr, self, "_backward_of", None))

        for value in tree_flatten(out)[0]:
            if torch.is_tensor(value) and value.requires_grad:
                value.register_hook(note)

    def call_outside_forward(self) -> ModelCall | None:
        """Return the call that a part belongs to if that part runs outside of the model's own call; None if unknown.

        A RuntimeError is raised if gradient checkpointing runs a block again whose call was merged by another patch.
        """
        if torch.is_tensor(self.begun):
            return self.calls.in_graph
        call = self._backward_of
        if call is not None and call.state is not self.patch:
            raise DeliberateError(_OF_ANOTHER_PATCH)
        return call

    def is_lost(self) -> bool:
        """Return whether another program removed the model's wrap without putting another wrapper there."""
        return bool(self.wraps) and not self.wraps[0].is_on_top() and foreign_method_on(self.wraps[0].target) is None

    def regain_top(self, level: int) -> None:
        """Put the model's wrap back on top for the next call if another program removed or replaced it.

        Until that wrap is called, the attentions that call this are counted as unmerged.
        """
        if self.patch is None or self.calls.disabled or not self.wraps:
            return
        if not self.wraps[0].is_on_top() or over_hook(self.wraps[0].target) is not None:
            self.calls.reason_missed = why_missed(self.wraps[0])
            self.put_back()
        if self.calls.reason_missed:
            self.patch.count_unmerged(level, self.calls.reason_missed)

    def __reduce__(self) -> tuple:
        return type(None), ()  # a copy of a patched model merges nothing


def wraps_on(model: nn.Module | None) -> WrapSet | None:
    """Return the set of wraps on a model; None if no patch is on it, or if the model is None."""
    return None if model is None else vars(model).get(_SET_MARK)


def put_on(model: nn.Module, adapter: Any, patch: Any, ways: Ways) -> Any:
    """Put the wraps of a patch on a model, in place of another's, and return the patch in force before, or None.

    Idempotent: if `patch` is in force already, its wraps only go back on top. An error removes all wraps.
    """
    with patch_lock:
        wraps = wraps_on(model)
        if wraps is None:
            wraps = vars(model)[_SET_MARK] = _RESTING.pop(model, None) or WrapSet()
        before = wraps.patch
        try:
            if before is not patch:  # hosts call this at each step, and walking over the model is slow
                wraps.change(model, adapter, patch, ways)
            wraps.put_back()
        except BaseException:
            take_off(model, patch)
            raise
        return before


def take_off(model: nn.Module, patch: Any) -> None:
    """Remove the wraps of a patch from a model, and keep them for its next patch; do nothing if it is not in force."""
    with patch_lock:
        wraps = wraps_on(model)
        if wraps is not None and wraps.patch is patch:
            wraps.take_off()
            vars(model).pop(_SET_MARK, None)
            _RESTING[model] = wraps


def drop_mark(module: nn.Module) -> None:
    """Remove from a module what `wraps_on` reads, as a copy or interrupt may leave it, unless a patch is in force."""
    if getattr(wraps_on(module), "patch", None) is None:
        vars(module).pop(_SET_MARK, None)


def forget_all() -> None:
    """Forget the removed wraps that are kept for the next patch of each model. For hosts that unload this engine."""
    _RESTING.clear()
