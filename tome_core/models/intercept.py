"""The attention function that a module's code calls, exchanged for one call, and for nobody else.

An attention is known by the function it calls, whatever its class or its processor is called. The very code is run with
another function under the name by which it finds its own; neither class nor module is changed, so hooks and processors
see all tokens. If no name leads there (a wrapper of another extension stands in between, or the code calls a helper),
torch's own function is watched instead, which is slower.
"""

from __future__ import annotations

import dis
import threading
from collections.abc import Callable, Sequence
from copy import copy
from functools import lru_cache
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
import torch.nn.functional
from torch import nn
from torch.overrides import TorchFunctionMode

from ..attention.by_hand import full_name
from ..compiling import when_traced
from .asked import TORCHS_OWN, Asked, ByDispatch, ByHeads, ByTorch, ByXformers


class _Now(threading.local):
    """answer: whom this thread's exchanged functions ask, if anybody."""

    def __init__(self) -> None:
        # in each thread's own dictionary, where a graph that was made by a thread's first call looks for it again
        self.answer: Callable[[Asked], torch.Tensor] | None = None


now = _Now()


class Like:
    """Stands in for a module of Python's, an attention or a processor: the same, but for these attributes."""

    def __init__(self, inner: Any, **instead: Any) -> None:
        self._inner = inner
        for name, value in instead.items():
            setattr(self, name, value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class _Exchanged:
    """A host's function, which is asked of `now.answer` first. asked: makes the `Asked` of its arguments."""

    def __init__(self, own: dict[str, Any], name: str, asked: Callable[..., Asked]) -> None:
        self._own, self._name, self.asked = own, name, asked

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if now.answer is None:
            return self._own[self._name](*args, **kwargs)
        return now.answer(self.asked(self._own[self._name], *args, **kwargs))  # looked up anew: hosts exchange it

    def read(self, *args: Any, **kwargs: Any) -> Asked:
        """A call of it."""
        return self.asked(self._own[self._name], *args, **kwargs)


_TORCHS = _Exchanged(vars(torch.nn.functional), "scaled_dot_product_attention", ByTorch)
_FUNCTIONAL = Like(torch.nn.functional, scaled_dot_product_attention=_TORCHS)
_NN = Like(torch.nn, functional=_FUNCTIONAL)
_TORCH_MODULES = {torch.nn.functional: _FUNCTIONAL, torch.nn: _NN, torch: Like(torch, nn=_NN)}
# by the name under which code finds its function, see `register_name`
_BY_NAME: dict[str, Callable[..., Asked]] = {"dispatch_attention_fn": ByDispatch}


def register_name(name: str, asked: Callable[..., Asked] = ByHeads) -> None:
    """Make known that a global of this name is an attention function. asked: reads its arguments."""
    _BY_NAME[name] = asked
    _way_of_code.cache_clear()
    _way_of_processor.cache_clear()


def names_known_to(code: Any) -> list[str]:
    """Full names of the functions that a function's module has under names that are known to be attention's."""
    found = getattr(code, "__globals__", {})
    return [full_name(found[name]) for name in _BY_NAME if name in found]


class Way:
    """How an attention's own code is run with another function in the place of its own.

    function: the code, to be called. names: globals that it shares with its module. again: the exchanged function,
    which the operator of a compiled graph asks. stand_in: class of what a graph calls in place of an attention, or of
    its processor. processor: class of the exchanged processor, if the code is a processor's.
    """

    processor: type | None = None

    def __init__(self, inner: FunctionType, names: list[str], instead: dict[str, Any], again: _Exchanged) -> None:
        self._own, self.again = inner.__globals__, again
        self.names = [name for name in names if name not in instead]
        # without its module's name, by which a compiler would look there for what is exchanged here
        self._globals = {name: one for name, one in self._own.items() if name != "__name__"} | instead
        code = _copy_of(inner.__code__)
        made = FunctionType(code, self._globals, inner.__name__, inner.__defaults__, inner.__closure__)
        made.__kwdefaults__, made.__annotations__ = inner.__kwdefaults__, inner.__annotations__
        self.function = made
        self.stand_in = type(inner.__name__, (Like,), {"__call__": made})

    def run(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """The attention's output, its function asked of ``now.answer``."""
        own, mine = self._own, self._globals
        for name in self.names:  # hosts exchange what their modules hold
            if name in own:
                mine[name] = own[name]
        if self.processor is None:
            return self.function(module, *args, **kwargs)
        # the attention with an exchanged processor: other objects over the same attributes
        processor, one = object.__new__(self.processor), object.__new__(type(module))
        processor.__dict__ = vars(module.processor)
        vars(one).update(vars(module))
        vars(one)["processor"] = processor
        return type(module).forward(one, *args, **kwargs)


def _copy_of(code: CodeType) -> CodeType:
    """With copies of the functions inside it. A compiler keeps what it makes by code, with names in its globals; and
    equal codes are one to it, hence one more constant.
    """
    inside = (_copy_of(one) if isinstance(one, CodeType) else one for one in code.co_consts)
    return code.replace(co_consts=(*inside, __name__))


def _names_in(code: CodeType) -> list[str]:
    """The names that code and the functions inside it look up."""
    inside = (one for one in code.co_consts if isinstance(one, CodeType))
    return list(dict.fromkeys([*code.co_names, *(name for one in inside for name in _names_in(one))]))


def _instead_of(name: str, own: dict[str, Any], names: Sequence[str]) -> tuple[Any, _Exchanged] | None:
    """What a global name of a code has to mean, and the exchanged function behind it; None for its own meaning."""
    value = own[name]
    if name in _BY_NAME:
        exchanged = _Exchanged(own, name, _BY_NAME[name])
        return exchanged, exchanged
    if value is TORCHS_OWN or value is torch.nn.functional.scaled_dot_product_attention:
        return _TORCHS, _TORCHS
    if not isinstance(value, ModuleType):
        return None
    if "scaled_dot_product_attention" in names and value in _TORCH_MODULES:
        return _TORCH_MODULES[value], _TORCHS
    if "memory_efficient_attention" in names and value.__name__ in ("xformers", "xformers.ops"):
        ops = getattr(value, "ops", value)
        exchanged = _Exchanged(vars(ops), "memory_efficient_attention", ByXformers)
        found = Like(ops, memory_efficient_attention=exchanged)
        return (found if ops is value else Like(value, ops=found)), exchanged
    return None


@lru_cache(maxsize=256)
def _way_of_code(function: Any) -> Way | None:
    """None if no name in the function leads to an attention function, or if it writes to globals."""
    if not isinstance(function, FunctionType) or _writes(function.__code__, "GLOBAL"):
        return None
    own, names = function.__globals__, _names_in(function.__code__)
    instead, exchanged = {}, None
    for name in names:
        found = _instead_of(name, own, names) if name in own else None
        if found is not None:
            instead[name], exchanged = found
    return None if exchanged is None else Way(function, names, instead, exchanged)


@lru_cache(maxsize=256)
def _way_of_processor(kind: type) -> Way | None:
    """By a class of processors whose code is this one's but for the attention function.

    None if that cannot be: an object without a dictionary cannot be another's, and what code writes to attributes of
    the attention would be lost.
    """
    way = _way_of_code(kind.__call__)
    if way is None or not kind.__dictoffset__ or _writes(way.function.__code__, "ATTR"):
        return None
    way = copy(way)
    way.processor = type(kind.__name__, (kind,), {"__call__": way.function})
    return way


def _writes(code: CodeType, what: str) -> bool:
    """Does code write to a "GLOBAL", or to an "ATTR" of anything but its first argument?"""
    target = None
    for one in dis.get_instructions(code):
        is_first = what == "ATTR" and code.co_varnames[:1] == (target,)
        if one.opname in (f"STORE_{what}", f"DELETE_{what}") and not is_first:
            return True
        target = one.argval[-1] if isinstance(one.argval, tuple) and one.argval else one.argval
    return any(_writes(one, what) for one in code.co_consts if isinstance(one, CodeType))


def way_of(module: nn.Module) -> Way | None:
    """None if no name in the attention's code leads to its function."""
    return _way_of_code(type(module).forward) or _way_of_processor(type(getattr(module, "processor", None)))


@when_traced
def traced(kind: type, method: str) -> type[Like] | None:
    """For a graph: a class of stand-ins, made of an attention or its processor, whose ``__call__`` is this method of
    the class with another attention function; None if that cannot be, or if the operator does not know its arguments.
    """
    way = _way_of_code(getattr(kind, method))
    return way.stand_in if way is not None and way.again.asked in (ByTorch, ByDispatch) else None


class Watching(TorchFunctionMode):
    """While it is in force, torch's attention function is asked of `now.answer`, whoever calls it."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        is_asked = func is TORCHS_OWN and now.answer is not None
        return (_TORCHS if is_asked else func)(*args, **(kwargs or {}))
