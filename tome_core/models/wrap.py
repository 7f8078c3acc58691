"""Wraps: replace a method of one object in place, and remove the replacement even if other programs wrapped it too."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from ..attention.descriptions import full_name
from ..compiling import is_tracing, when_traced
from ..reporting.ledger import REPLACED, TAKEN_OFF

# Whether to install a bound method of the wrap instead of the wrap itself. With a callable object the compiler makes
# one graph for each block, although compile_repeated_blocks needs one for all, and gives up after eight. The compilers
# of torch 2.4 to 2.6 refuse bound methods here; those of 2.8, 2.10 and 2.13 accept them.
_BOUND = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 8)
_MARK = "_tome_core_wrap"
_WRAPPERS: dict[str, Callable[[nn.Module, Any], Any]] = {}  # see `register_wrapper`
patch_lock = threading.RLock()  # held while wraps are installed or removed: two threads may patch one model


class Wrap:
    """A replacement of one method of one object from `install` to `uninstall`; subclasses do their work in `run`.

    The method below a wrap never changes. Another extension's wrapper on top may have saved this wrap as "the
    original", and a wrap that later called that wrapper would call itself. A wrap that was removed, or that was left
    below another wrapper, passes all calls through to `original`. A copy or a pickle of the target gets a wrap that
    passes calls through to the copy.

    Attributes:
        name: the name of the method.
        target: the object; None after the wrap was removed, unless another extension's method was below or above it.
        beneath: the method of another extension that this wrap calls; None for the method of the class.
        active: True if the wrap works, False if it passes calls through.
        path: the name of the wrapped attention in its model; "" for other targets.
    """

    path = ""

    def __init__(self, target: Any, name: str = "forward") -> None:
        self.target, self.name, self.beneath = target, name, None
        self.active = self._placed = False
        self._target_ref: Callable[[], Any] = weakref.ref(target)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Answer a call of the method while the wrap is active: here by `original`; subclasses override this."""
        return self.original(*args, **kwargs)

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """Answer a call of the method, instead of `run`, while a compiler traces: here by `original`."""
        return self.original(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Answer any call of the method: by `run` (`trace` if a compiler traces) if active, else by `original`."""
        if not isinstance(self, Wrap):  # another program bound this function to the target, to restore "the original"
            wrap, kind = vars(self).get(_MARK), type(self)
            class_method = partial(getattr(kind, "_forward", kind.forward), self)  # see `fewer_tokens`
            return (class_method if wrap is None else wrap.forward)(*args, **kwargs)
        if not self.active:
            return self.original(*args, **kwargs)
        return (self.trace if torch.compiler.is_compiling() and is_tracing() else self.run)(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Answer any call of the method, see `forward`."""
        return self.forward(*args, **kwargs)

    def original(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method below this wrap: another extension's replacement, or else the method of the class."""
        if self.beneath is not None:
            return self.beneath(*args, **kwargs)
        if torch.compiler.is_compiling() and is_tracing():
            return calling(type(self.target), self.name)()(self.target, *args, **kwargs)
        target = self.wrapped()  # its class is read now: hosts replace methods of classes, and classes of objects
        return getattr(type(target), self.name)(target, *args, **kwargs)

    def wrapped(self) -> Any:
        """Return the target, even after the wrap was removed; None if the target no longer exists."""
        return self._target_ref() if self.target is None else self.target

    def is_on_top(self) -> bool:
        """Return whether a call of the method reaches this wrap first (or first below accelerate's hook)."""
        return self.target is not None and wrap_of(vars(self.target).get(self._slot())) is self

    def install(self) -> Wrap:
        """Put the wrap on top of all replacements of the method, activate it, and return it. Idempotent.

        If another extension has replaced the method since the wrap was installed, an active copy goes on top and is
        returned; this wrap passes calls through. Otherwise the object is reused: that keeps compiled graphs valid.
        """
        wrap, self.target = self, self.wrapped()
        if not self.is_on_top():
            current = self._find_beneath()
            if not self._placed:
                self.beneath = current
            elif current != self.beneath:
                self.active = False
                wrap = self._new_wrap()
                wrap.beneath = current
            setattr(self.target, self._slot(), wrap.forward if _BOUND else wrap)
            # the mark is the first wrap: other extensions have saved its function and may bind it again
            vars(self.target).setdefault(_MARK, wrap)
        wrap._placed = wrap.active = True
        return wrap

    def _new_wrap(self) -> Wrap:
        """Return a shallow copy of this wrap, with all its attributes, for `install` to put on the same target."""
        wrap = object.__new__(type(self))
        vars(wrap).update(vars(self))
        return wrap

    def uninstall(self) -> None:
        """Turn the wrap off. If it is on top, restore the method below; if that is the class's, release the target."""
        self.active, target = False, self.target
        if target is None:
            return
        if self.is_on_top():
            self._leave()
            if self.beneath is None:
                self.target, self._placed = None, False
        vars(target).pop(_MARK, None)

    def _leave(self) -> None:
        """Put the method below this wrap, which has to be on top, back on the target; skip inactive wraps below it."""
        slot, method = self._slot(), without_inert(self.beneath)
        if method is None and slot != self.name:
            method = getattr(type(self.target), self.name).__get__(self.target)
        if method is None:  # the method of the class, which needs no attribute
            del vars(self.target)[slot]
        else:
            vars(self.target)[slot] = method

    def _slot(self) -> str:
        """Return the name of the attribute to replace: `name`, or ``_old_forward`` if accelerate's hook calls that."""
        # the hook calls this and restores it when it is removed, so a wrap above the hook would be lost
        hooked = self.name == "forward" and {"_hf_hook", "_old_forward"} <= vars(self.target).keys()
        return "_old_forward" if hooked else self.name

    def _find_beneath(self) -> Any:
        """Return the method on which this wrap would go, past inactive wraps; None for the class's, even if bound."""
        method = without_inert(vars(self.target).get(self._slot()))
        is_bound = getattr(method, "__self__", None) is self.target
        # A wrap's function that another program bound to the target counts as the class's: it calls the class's method.
        functions = getattr(type(self.target), self.name), type(self).forward, Wrap.forward
        return None if is_bound and getattr(method, "__func__", None) in functions else method

    def __reduce__(self) -> tuple:
        return object.__new__, (Wrap,), (self.name, self.wrapped(), self.beneath)

    def __setstate__(self, state: tuple[str, Any, Any]) -> None:
        self.name, self.target, self.beneath = state
        self.active, self._placed, self._target_ref = False, True, lambda: None


@when_traced
def calling(kind: type, name: str) -> type:
    """Return a class whose instances call the method `name` of `kind`. Their first argument is the method's ``self``.

    A compiler cannot trace the look-up of a method for every class, so this look-up is a constant for it.
    """
    method = getattr(kind, name)
    return type(name, (), {"__call__": lambda self, *args, **kwargs: method(*args, **kwargs)})


def drop_remains(target: Any) -> None:
    """Remove inactive wraps, as copies have them or other extensions restored them, from the methods that we wrap."""
    with patch_lock:
        for slot in ("forward", "_forward", "_old_forward", "_compiled_call_impl", "progress_bar"):
            wrap = wrap_of(vars(target).get(slot))
            if wrap is None or wrap.active or wrap.wrapped() is not target:
                continue
            wrap.target = target
            if wrap.is_on_top():
                wrap._leave()
            vars(target).pop(_MARK, None)


def foreign_method_on(module: nn.Module, name: str = "forward") -> Any:
    """Return another extension's method on top of our wrap or directly below it (not accelerate's hook), or None."""
    method = over_hook(module) or Wrap(module, name)._find_beneath()
    ours = wrap_of(method)
    return method if ours is None else without_inert(ours.beneath)


def over_hook(module: nn.Module | None) -> Any:
    """Return another extension's ``forward`` on top of accelerate's hook; None with no hook or with nothing on it."""
    attributes = {} if module is None else vars(module)
    is_hook = getattr(getattr(attributes.get("forward"), "func", None), "__name__", "") == "new_forward"
    return None if is_hook or not {"_hf_hook", "_old_forward"} <= attributes.keys() else attributes.get("forward")


def wrap_of(method: Any) -> Wrap | None:
    """Return the wrap that `method` is, or is bound to, or whose ``forward`` it is, bound to its target; else None."""
    owner = getattr(method, "__self__", method)
    if isinstance(owner, Wrap):
        return owner
    mark = vars(owner).get(_MARK) if hasattr(owner, "__dict__") else None
    return mark if mark is not None and getattr(method, "__func__", None) is type(mark).forward else None


def without_inert(method: Any) -> Any:
    """Return `method`, or the first below it that is no inactive wrap's. None stands for the method of the class."""
    while (wrap := wrap_of(method)) is not None and not wrap.active:
        method = wrap.beneath
    return method


def why_missed(wrap: Wrap) -> str:
    """Return why calls miss a wrap: `REPLACED`, with the name of another extension's method, or `TAKEN_OFF`."""
    method = foreign_method_on(wrap.target)
    return TAKEN_OFF if method is None else f"{REPLACED}: {full_name(method)}"


def register_wrapper(name: str, beneath: Callable[[nn.Module, Any], Any]) -> None:
    """Register a kind of wrappers of another extension, so that `is_own` sees through them.

    Args:
        name: a name of the kind. A second call with the same name replaces the first.
        beneath: takes a module and the replacement of its ``forward``. Returns the method that this replacement
            calls if it does nothing else at the moment; None if it does more, or is not of this kind.
    """
    _WRAPPERS[name] = beneath


def is_own(module: nn.Module, method: Any, name: str = "forward") -> bool:
    """Return whether a replacement of a module's method only calls the class's, through wrappers of known kinds."""
    while method is not None:
        if getattr(method, "__self__", None) is module:
            return getattr(method, "__func__", None) is getattr(type(module), name)
        inner = [below for beneath in _WRAPPERS.values() if (below := beneath(module, method)) is not None]
        if not inner:
            return False
        method = without_inert(inner[0])  # other extensions may have wrapped a wrap that was removed since
    return True
