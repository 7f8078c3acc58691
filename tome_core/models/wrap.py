"""Wrapping one method of one object in place, and taking the wrap off again whatever others did meanwhile.

A `WrapSet` is all wraps on one model: which patch they serve, the calls that go on, and how they come off again.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from ..attention.by_hand import full_name
from ..compiling import is_tracing, when_traced
from ..engine.decision import Call
from ..reporting.ledger import REPLACED, TAKEN_OFF

# What is put on: a bound method of the wrap, because with a callable object the compiler makes a graph of its own for
# each block where compile_repeated_blocks needs one for all, and gives up after eight. The compilers of torch 2.4 to
# 2.6 refuse bound methods in this place; those of 2.8, 2.10 and 2.13 were seen to take them.
_BOUND = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 8)
_MARK, _SET_MARK = "_tome_core_wrap", "_tome_core_patch"
_WRAPPERS: dict[str, Callable[[nn.Module, Any], Any]] = {}  # what sees through wrappers that others leave, by name
_OF_ANOTHER_PATCH = (
    "gradient checkpointing runs a call again that was merged by another patch: call backward() before a patch is "
    "put on or taken off, or turn checkpointing off"
)
patch_lock = threading.RLock()  # held while wraps are put on or taken off: two threads may patch one model
_RESTING: weakref.WeakKeyDictionary[nn.Module, WrapSet] = weakref.WeakKeyDictionary()


class Wrap:
    """Stands in for ``target.NAME`` on the instance; subclasses put their work into `run`.

    What lies beneath is fixed for life: a foreign wrapper on top may have saved this one as "the original", and a wrap
    that later called that wrapper would call itself. Removed, or left underneath another's wrapper, it passes calls
    through for ever. A copy or a pickle of the target gets a wrap that passes calls through to the copy.

    path: of the attention that it stands around, if it does.
    """

    path = ""

    def __init__(self, target: Any, name: str = "forward") -> None:
        self.target, self.name, self.beneath = target, name, None
        self.active = self._placed = False
        self._resting: Callable[[], Any] = weakref.ref(target)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """What callers of ``target.NAME`` get while the wrap is active."""
        return self.original(*args, **kwargs)

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """What a compiler gets, as `run`."""
        return self.original(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What is put in place of ``target.NAME``."""
        if not isinstance(self, Wrap):  # somebody bound this function to the target, to restore "the original"
            wrap, kind = vars(self).get(_MARK), type(self)
            own = partial(getattr(kind, "_forward", kind.forward), self)  # see `BlockSite`
            return (own if wrap is None else wrap.forward)(*args, **kwargs)
        if not self.active:
            return self.original(*args, **kwargs)
        return (self.trace if torch.compiler.is_compiling() and is_tracing() else self.run)(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    def original(self, *args: Any, **kwargs: Any) -> Any:
        """What ``target.NAME`` did before: another's replacement, else the class's method.

        The class is asked at every call, because hosts replace methods of classes, and classes of objects.
        """
        if self.beneath is not None:
            return self.beneath(*args, **kwargs)
        if torch.compiler.is_compiling() and is_tracing():
            return calling(type(self.target), self.name)()(self.target, *args, **kwargs)
        target = self.wrapped()
        return getattr(type(target), self.name)(target, *args, **kwargs)

    def wrapped(self) -> Any:
        """The target, also after the wrap was taken off; None once it is gone."""
        return self._resting() if self.target is None else self.target

    def is_on_top(self) -> bool:
        """Is it this object that ``target.NAME`` calls first (below accelerate's hook, if there is one)?"""
        return self.target is not None and wrap_of(vars(self.target).get(self._slot())) is self

    def install(self) -> Wrap:
        """Put it on top and return the wrap in force: this one, or a copy over what others have put there since.

        Reusing the same object keeps a compiled graph valid; idempotent.
        """
        wrap, self.target = self, self.wrapped()
        if not self.is_on_top():
            current = self._find()
            if not self._placed:
                self.beneath = current
            elif current != self.beneath:
                self.active = False
                wrap = self._again()
                wrap.beneath = current
            setattr(self.target, self._slot(), wrap.forward if _BOUND else wrap)
            vars(self.target).setdefault(_MARK, wrap)  # the first: it is what others have saved, and may bind anew
        wrap._placed = True
        wrap.active = True
        return wrap

    def _again(self) -> Wrap:
        """Another like this one, on the same target."""
        wrap = object.__new__(type(self))
        vars(wrap).update(vars(self))
        return wrap

    def uninstall(self) -> None:
        """Take it off, leave what was there before, and hold the target no longer; underneath another's wrapper, become
        a pass-through.
        """
        self.active, target = False, self.target
        if target is None:
            return
        if self.is_on_top():
            self._leave()
            if self.beneath is None:
                self.target, self._placed = None, False
        vars(target).pop(_MARK, None)

    def _leave(self) -> None:
        slot, method = self._slot(), without_inert(self.beneath)
        if method is None and slot != self.name:
            method = getattr(type(self.target), self.name).__get__(self.target)
        if method is None:  # the class's own
            del vars(self.target)[slot]
        else:
            vars(self.target)[slot] = method

    def _slot(self) -> str:
        """The attribute to stand in.

        accelerate's hook calls ``_old_forward`` and puts that back when it leaves: what stood above it would be lost.
        """
        hooked = self.name == "forward" and {"_hf_hook", "_old_forward"} <= vars(self.target).keys()
        return "_old_forward" if hooked else self.name

    def _find(self) -> Any:
        """What others have put into the slot; None for the class's own method, which accelerate puts there."""
        method = without_inert(vars(self.target).get(self._slot()))
        own = getattr(method, "__self__", None) is self.target
        # ours, too, if another has bound it to the target after it was taken off: it comes down to the class's
        classes = getattr(type(self.target), self.name), type(self).forward, Wrap.forward
        return None if own and getattr(method, "__func__", None) in classes else method

    def __reduce__(self) -> tuple:
        return object.__new__, (Wrap,), (self.name, self.wrapped(), self.beneath)

    def __setstate__(self, state: tuple[str, Any, Any]) -> None:
        self.name, self.target, self.beneath = state
        self.active, self._placed, self._resting = False, True, lambda: None


@when_traced
def calling(kind: type, name: str) -> type:
    """A class of what calls a class's method, because a compiler cannot follow that question for every class."""
    method = getattr(kind, name)
    return type(name, (), {"__call__": lambda self, *args, **kwargs: method(*args, **kwargs)})


def drop_remains(target: Any) -> None:
    """Take off our wraps that another's has put back on leaving, and those of a copy."""
    with patch_lock:
        for slot in ("forward", "_forward", "_old_forward", "progress_bar"):
            wrap = wrap_of(vars(target).get(slot))
            if wrap is None or wrap.active or wrap.wrapped() is not target:
                continue
            wrap.target = target
            if wrap.is_on_top():
                wrap._leave()
            vars(target).pop(_MARK, None)


def others_on(module: nn.Module) -> Any:
    """What anybody but us, and accelerate, has put in the place of ``module.forward``; None if nothing."""
    found = over_hook(module) or Wrap(module)._find()
    ours = wrap_of(found)
    return found if ours is None else without_inert(ours.beneath)


def over_hook(module: nn.Module | None) -> Any:
    """What somebody has put in the place of accelerate's hook, beneath which our wrap is; None if nothing."""
    own = {} if module is None else vars(module)
    is_theirs = getattr(getattr(own.get("forward"), "func", None), "__name__", "") == "new_forward"
    return None if is_theirs or not {"_hf_hook", "_old_forward"} <= own.keys() else own.get("forward")


def wrap_of(method: Any) -> Wrap | None:
    """The wrap behind what was found as a method, if there is one."""
    owner = getattr(method, "__self__", method)
    if isinstance(owner, Wrap):
        return owner
    mark = vars(owner).get(_MARK) if hasattr(owner, "__dict__") else None
    # the wrap's own function, bound to its target by another program
    return mark if mark is not None and getattr(method, "__func__", None) is type(mark).forward else None


def without_inert(method: Any) -> Any:
    """What a method comes down to below wraps that were removed; without this, chains of them would grow."""
    while (wrap := wrap_of(method)) is not None and not wrap.active:
        method = wrap.beneath
    return method


def why_passed(wrap: Wrap) -> str:
    """Why calls of a target do not come to its wrap, which is not on top."""
    found = others_on(wrap.target)
    return TAKEN_OFF if found is None else f"{REPLACED}: {full_name(found)}"


def register_wrapper(name: str, beneath: Callable[[nn.Module, Any], Any]) -> None:
    """Make somebody's wrappers known.

    beneath: of a module and what stands in place of its ``forward``: what that does nothing but call at this moment;
    None where it does more, or is another's. A second one of a name replaces the first.
    """
    _WRAPPERS[name] = beneath


def is_own(module: nn.Module, method: Any) -> bool:
    """Does the method, in place of the module's ``forward``, come down to the class's? None stands for the class's."""
    while method is not None:
        if getattr(method, "__self__", None) is module:
            return getattr(method, "__func__", None) is type(module).forward
        found = [one for beneath in _WRAPPERS.values() if (one := beneath(module, method)) is not None]
        if not found:
            return False
        method = without_inert(found[0])  # of ours, which they may have found when they came
    return True


# --- all wraps on a model ---------------------------------------------------------------------------------------------


class Calls(threading.local):
    """Of one model, in each thread. in_graph: the latest that a graph has begun; off: nothing is to merge; passed: why
    the latest was none of ours.
    """

    now: Call | None = None
    in_graph: Call | None = None
    off, passed = 0, ""


class WrapSet:
    """The wraps of one model, and what they share.

    handle: the patch in force. While there is none the wraps rest, holding no module, and the next patch gets the same
    objects: a compiled model knows them. adapter: reads the model's calls. begun: while a compiler traces the model's
    own call, what its attentions are told of it, or why it is left alone. paths: of the attentions with a wrap.
    """

    def __init__(self) -> None:
        self.paths: frozenset[str] = frozenset()
        self.adapter: Any = None
        self.handle: Any = None
        self.begun: torch.Tensor | str | None = None
        self.calls = Calls()
        self._goes_back: Call | None = None  # whose backward pass goes on
        self.on: list[Wrap] = []
        self._off: dict[tuple[type, int], Wrap] = {}

    def change(self, model: nn.Module, adapter: Any, handle: Any, levels: set[int], around: set[int]) -> None:
        """Have what this patch needs, and nothing else; it is not put on yet."""
        self.adapter, self.handle = adapter, handle
        self._off |= {(type(one), id(one.target)): one for one in self.on}
        wraps = list(adapter.wraps(model, levels, around, self._reuse_or_make))
        for wrap in reversed([one for one in self.on if one not in wraps]):
            wrap.uninstall()
        self._off = {key: one for key, one in self._off.items() if one.target is None}  # others hold their module
        self.on, self.paths = wraps, frozenset(filter(None, (wrap.path for wrap in wraps)))

    def _reuse_or_make(self, kind: type[Wrap], module: nn.Module, *facts: Any) -> Wrap:
        found = self._off.pop((kind, id(module)), None)
        return found if found is not None and found.wrapped() is module else kind(module, self, *facts)

    def put_back(self) -> None:
        """Have all wraps on top of what others have put on the model."""
        self.on = [wrap.install() for wrap in self.on]

    def take_off(self) -> None:
        """Leave the model as it was found; again if an interrupt has come in between."""
        for wrap in reversed(self.on):
            target = wrap.target
            wrap.uninstall()
            if target is not None and wrap.target is None:  # it rests
                self._off[type(wrap), id(target)] = wrap
        self.on, self.handle = [], None

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

    def is_lost(self) -> bool:
        """Has another program taken the model's wrap off, and put nothing in its place?"""
        return bool(self.on) and not self.on[0].is_on_top() and others_on(self.on[0].target) is None

    def look_after_itself(self, level: int) -> None:
        """An attention runs outside of any call: if another program has taken the model's wrap off, as DeepCache does
        when it goes, or runs in its place, it is put on top for the next call.
        """
        if self.handle is None or self.calls.off or not self.on:
            return
        if not self.on[0].is_on_top() or over_hook(self.on[0].target) is not None:
            self.calls.passed = why_passed(self.on[0])
            self.put_back()
        if self.calls.passed:
            self.handle.leave_alone(level, self.calls.passed, 0, 0, 0)

    def __reduce__(self) -> tuple:
        return type(None), ()  # a copy of a patched model merges nothing


def wraps_on(model: nn.Module | None) -> WrapSet | None:
    """The wraps of the patch in force on the model; None if there is none."""
    return None if model is None else vars(model).get(_SET_MARK)


def put_on(model: nn.Module, adapter: Any, handle: Any, levels: set[int], around: set[int]) -> Any:
    """Put the handle's wraps on the model. Returns the handle that was in force before."""
    with patch_lock:
        found = wraps_on(model)
        if found is None:
            found = vars(model)[_SET_MARK] = _RESTING.pop(model, None) or WrapSet()
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
            vars(model).pop(_SET_MARK, None)
            _RESTING[model] = found


def drop_mark(module: nn.Module) -> None:
    """Take off what a copy of a patched model has brought along, or an interrupt has left."""
    if getattr(wraps_on(module), "handle", None) is None:
        vars(module).pop(_SET_MARK, None)


def forget_all() -> None:
    """Let go of what rests, for whoever unloads this copy of the engine."""
    _RESTING.clear()
