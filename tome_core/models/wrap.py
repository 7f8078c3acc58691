"""Wrapping one method of one object in place, and taking the wrap off again whatever others did meanwhile."""

from __future__ import annotations

import copy
import weakref
from functools import partial
from typing import Any

import torch

from ..compiling import compiles_here
from .switch import patch_lock

# What is put on: a bound method of the wrap, because with a callable object the compiler makes a graph of its own for
# each block where compile_repeated_blocks needs one for all, and gives up after eight. The compilers of torch 2.4 to
# 2.6 refuse bound methods in this place; those of 2.8, 2.10 and 2.13 were seen to take them.
_BOUND = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 8)
_REPLICATE = "_replicate_for_data_parallel"
_SLOTS = ("forward", "_forward", "_old_forward")


class Wrap:
    """Stands in for ``target.NAME`` on the instance; subclasses put their work into `forward`.

    An object instead of a closure, so that a deep copy or a pickle of the target calls the copy's weights. What
    lies beneath is fixed for life: a foreign wrapper on top may have saved this one as "the original", and a wrap that
    later called that wrapper would call itself. Removed, or left underneath somebody else's wrapper, it passes calls
    through for ever.
    """

    def __init__(self, target: Any, name: str = "forward") -> None:
        self.target = target
        self.name = name
        self.active = False
        self.beneath: Any = None
        self._placed = False
        self._resting: weakref.ref[Any] | None = None
        self._of_class = getattr(type(target), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What callers of ``target.NAME`` get."""
        return self.original(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    def original(self, *args: Any, **kwargs: Any) -> Any:
        """What ``target.NAME`` did before: somebody's own replacement, else the class's method.

        The class is asked at every call, because hosts replace methods of classes, and classes of objects. A
        compiler cannot follow that question for every class, so it gets the answer of the last `install`.
        """
        if self.beneath is not None:
            return self.beneath(*args, **kwargs)
        if torch.compiler.is_compiling() and compiles_here():
            return self._of_class(self.target, *args, **kwargs)
        target = self.target
        if target is None:  # somebody has kept a wrap that was removed since
            target = self.rests_from()
        return getattr(type(target), self.name)(target, *args, **kwargs)

    def is_on_top(self) -> bool:
        """Is it this object that ``target.NAME`` calls first (below accelerate's hook, if there is one)?"""
        return _wrap_of(vars(self.target).get(self._slot())) is self

    def _slot(self) -> str:
        """The attribute to stand in.

        accelerate's hook calls ``_old_forward`` and puts that back when it leaves: what stood above it would be lost.
        """
        return "_old_forward" if self.name == "forward" and under_accelerate(self.target) else self.name

    def _find(self) -> Any:
        """What others have put into the slot; None for the class's own method, which accelerate puts there."""
        method = without_inert(vars(self.target).get(self._slot()))
        own = getattr(method, "__self__", None) is self.target
        return None if own and getattr(method, "__func__", None) is getattr(type(self.target), self.name) else method

    def install(self) -> Wrap:
        """Put it on top and return the wrap in force: this one, or a copy over what others have put there since.

        Reusing the same object keeps a compiled graph valid; idempotent. Subclasses keep what a call in progress
        knows in objects that a copy shares.
        """
        wrap = self
        if not self.is_on_top():
            current = self._find()
            if not self._placed:
                self.beneath = current
            elif current != self.beneath:
                self.active = False
                wrap = copy.copy(self)
                wrap.beneath = current
            setattr(self.target, self._slot(), wrap.forward if _BOUND else wrap)
            if isinstance(self.target, torch.nn.Module):
                vars(self.target)[_REPLICATE] = partial(_replicate_plainly, self.target)
        wrap._placed = True
        wrap._of_class = getattr(type(self.target), self.name)
        wrap.active = True
        return wrap

    def uninstall(self) -> None:
        """Take it off and leave what was there before; underneath another's wrapper, become a pass-through."""
        self.active = False
        vars(self.target).pop(_REPLICATE, None)
        if self.is_on_top():
            self.leave()

    def leave(self) -> None:
        """From the top, where `target.NAME` is this object's: put what was there before into its place."""
        slot, beneath = self._slot(), without_inert(self.beneath)
        if beneath is not None:
            setattr(self.target, slot, beneath)
        elif slot == self.name:
            delattr(self.target, slot)
        else:
            setattr(self.target, slot, getattr(type(self.target), self.name).__get__(self.target))

    def rest(self) -> None:
        """After `uninstall` from the top: hold the target no longer, and begin anew where `wake` finds it."""
        self._resting = weakref.ref(self.target)
        self.target = self.beneath = None
        self._placed = False

    def rests_from(self) -> Any:
        """The target, of one that rests or does not."""
        target = self.target
        return self._resting() if target is None and self._resting is not None else target

    def wake(self) -> bool:
        """Hold the target again; False where it is gone."""
        if self._resting is not None:
            self.target, self._resting = self._resting(), None
        return self.target is not None

    def __getstate__(self) -> dict[str, Any]:
        # not every function can be pickled; this one is found again. A copy of one that rests, which somebody's wrapper
        # has kept, is a pass-through to the copy of its target
        state = {key: value for key, value in vars(self).items() if key != "_of_class"}
        return state | {"target": self.rests_from(), "_resting": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._of_class = getattr(type(self.target), self.name, None)


def under_accelerate(target: Any) -> bool:
    """Does a hook of accelerate's stand in for ``target.forward``, which it then keeps as ``_old_forward``?"""
    return {"_hf_hook", "_old_forward"} <= vars(target).keys()


def drop_remains(target: Any) -> None:
    """Take off our wraps that were removed beneath somebody else's, who has put them back on leaving."""
    with patch_lock():  # in another thread a wrap may be on its way off, which looks alike
        for method in (vars(target).get(slot) for slot in _SLOTS):
            wrap = _wrap_of(method)
            if wrap is None or wrap.active or wrap.rests_from() is not target:
                continue
            rests = wrap.target is None
            if wrap.wake() and wrap.is_on_top():
                wrap.leave()
            if rests:
                wrap.rest()


def is_wrapped_by_others(module: torch.nn.Module) -> bool:
    """Does anybody but us, and accelerate, stand in for ``module.forward``?"""
    found = Wrap(module)._find()
    ours = _wrap_of(found)
    return (found if ours is None else without_inert(ours.beneath)) is not None


def _replicate_plainly(module: torch.nn.Module) -> torch.nn.Module:
    """What `torch.nn.DataParallel` asks a module for: a copy that shares its attributes, here without our wrap.

    The wrap's module is the first one, so a replica would run that one's weights; without it, it merges nothing.
    """
    replica = type(module)._replicate_for_data_parallel(module)
    for slot in _SLOTS:
        if _wrap_of(vars(replica).get(slot)) is not None:
            beneath = _wrap_of(vars(replica)[slot]).beneath
            if beneath is None:
                del vars(replica)[slot]
            else:
                vars(replica)[slot] = beneath
    vars(replica).pop(_REPLICATE, None)
    return replica


def _wrap_of(method: Any) -> Wrap | None:
    """The wrap behind what was found as a method, if there is one."""
    owner = getattr(method, "__self__", method)
    return owner if isinstance(owner, Wrap) else None


def without_inert(method: Any) -> Any:
    """What a method comes down to below wraps that were removed; without this, chains of them would grow."""
    while (wrap := _wrap_of(method)) is not None and not wrap.active:
        method = wrap.beneath
    return method
