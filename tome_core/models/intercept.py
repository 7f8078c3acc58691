"""Replace the attention function that a module's code calls, for a single call of that module only.

An attention is recognised by the function that it calls, not by the name of its class or processor. A copy of its code
runs with different globals, in which the name of that function refers to a replacement. Neither the class nor the
module changes, so hooks and processors still see all tokens. If no global name leads to the function (a wrapper of
another extension is in between, or the code calls a helper), torch's own is watched: `InterceptTorch`, which is slower.
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

from ..attention.descriptions import full_name
from ..compiling import when_traced
from .attention_calls import TORCHS_OWN, AttentionCall, DispatchCall, HeadsCall, TorchCall, XformersCall


class _Current(threading.local):
    """This thread's function that answers an `AttentionCall` in the host's form; None: the host's function does."""

    def __init__(self) -> None:
        # set in each thread's own dictionary, because compiled graphs look for the attribute there
        self.answer: Callable[[AttentionCall], torch.Tensor] | None = None


current = _Current()


class Overlay:
    """A stand-in for `inner` (a Python module, an attention, a processor), which differs in the attributes `instead`.

    Attributes that are set later do not change `inner` either. Only a subclass with ``__call__`` can be called.
    """

    def __init__(self, inner: Any, **instead: Any) -> None:
        self._inner = inner
        for name, value in instead.items():
            setattr(self, name, value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class _ReplacedFunction:
    """A host's function `namespace[name]`, replaced: `read_call` reads each call, and `current.answer` answers it."""

    def __init__(self, namespace: dict[str, Any], name: str, read_call: Callable[..., AttentionCall]) -> None:
        self._namespace, self._name, self.read_call = namespace, name, read_call

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if current.answer is None:
            return self._namespace[self._name](*args, **kwargs)
        # the function is looked up at each call, because hosts replace it
        return current.answer(self.read_call(self._namespace[self._name], *args, **kwargs))

    def read(self, *args: Any, **kwargs: Any) -> AttentionCall:
        """Return a call of the host's function as an `AttentionCall`, without computing it."""
        return self.read_call(self._namespace[self._name], *args, **kwargs)


_REPLACED_TORCH = _ReplacedFunction(vars(torch.nn.functional), "scaled_dot_product_attention", TorchCall)
_FUNCTIONAL = Overlay(torch.nn.functional, scaled_dot_product_attention=_REPLACED_TORCH)
_NN = Overlay(torch.nn, functional=_FUNCTIONAL)
_TORCH_MODULES = {torch.nn.functional: _FUNCTIONAL, torch.nn: _NN, torch: Overlay(torch, nn=_NN)}
# Readers of calls by the global name of the attention function, see `register_name`.
_BY_NAME: dict[str, Callable[..., AttentionCall]] = {"dispatch_attention_fn": DispatchCall}


def register_name(name: str, read_call: Callable[..., AttentionCall] = HeadsCall) -> None:
    """Register a global name as that of an attention function, so that attentions whose code calls it can merge.

    ``read_call(function, *args, **kwargs)`` makes an `AttentionCall`. A second entry for a name replaces the first.
    """
    _BY_NAME[name] = read_call
    _replacement_in_code.cache_clear()
    _replacement_in_processor.cache_clear()


def attention_names_in(code: Any) -> list[str]:
    """Return full names of all functions that `code`'s globals hold under registered names, even if it calls none."""
    namespace = getattr(code, "__globals__", {})
    return [full_name(namespace[name]) for name in _BY_NAME if name in namespace]


class CodeReplacement:
    """A copy of an attention's own code, `inner`, that calls `replaced_function`; `run` runs the copy.

    `inner` is a ``forward``, or the ``__call__`` of a processor. Of all globals and attributes that it looks up,
    `names`, those in `instead` have the values given there; `run` reads the other globals at each call.

    Attributes:
        names: the names that are not in `instead`.
        function: the copy.
        stand_in: a subclass of `Overlay` for an attention or a processor; calling an instance runs `function` on it.
        processor: a subclass of the processor's class that uses the replacement; None if the code is not a processor's.
    """

    processor: type | None = None

    def __init__(
        self, inner: FunctionType, names: list[str], instead: dict[str, Any], replaced_function: _ReplacedFunction
    ) -> None:
        self._host_globals, self.replaced_function = inner.__globals__, replaced_function
        self.names = [name for name in names if name not in instead]
        # without "__name__": a compiler would look up globals in the module of that name, not in this dictionary
        self._globals = {name: value for name, value in self._host_globals.items() if name != "__name__"} | instead
        code = _copy_of(inner.__code__)
        function = FunctionType(code, self._globals, inner.__name__, inner.__defaults__, inner.__closure__)
        function.__kwdefaults__, function.__annotations__ = inner.__kwdefaults__, inner.__annotations__
        self.function = function
        self.stand_in = type(inner.__name__, (Overlay,), {"__call__": function})

    def run(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Call ``forward`` of an attention module by the copy, and return its output. The module does not change."""
        host_globals, own_globals = self._host_globals, self._globals
        for name in self.names:  # hosts replace globals of their modules
            if name in host_globals:
                own_globals[name] = host_globals[name]
        if self.processor is None:
            return self.function(module, *args, **kwargs)
        # run a copy of the attention that shares its attributes, except for the processor
        processor, attention = object.__new__(self.processor), object.__new__(type(module))
        processor.__dict__ = vars(module.processor)
        vars(attention).update(vars(module))
        vars(attention)["processor"] = processor
        return type(module).forward(attention, *args, **kwargs)


def _copy_of(code: CodeType) -> CodeType:
    """Return a copy of code and of functions inside it, with one more constant, so that compilers tell them apart."""
    # A compiler caches results by code object, and equal ones share an entry: so each has one more constant.
    constants = (_copy_of(value) if isinstance(value, CodeType) else value for value in code.co_consts)
    return code.replace(co_consts=(*constants, __name__))


def _names_in(code: CodeType) -> list[str]:
    """Return the names, each once, of globals and attributes that code and the functions inside it look up."""
    functions = (value for value in code.co_consts if isinstance(value, CodeType))
    return list(dict.fromkeys([*code.co_names, *(name for inner in functions for name in _names_in(inner))]))


def _replacement_of(name: str, namespace: dict[str, Any], names: Sequence[str]) -> tuple[Any, _ReplacedFunction] | None:
    """Return the value to put in place of ``namespace[name]``, and the replaced function in it; None to keep it.

    It is replaced if its name is registered, or if it is torch's function (the replaced function is the value itself);
    or if it is a module by which code with `names` calls torch's or xformers' function (the value is an `Overlay`).
    """
    value = namespace[name]
    if name in _BY_NAME:
        exchanged = _ReplacedFunction(namespace, name, _BY_NAME[name])
        return exchanged, exchanged
    if value is TORCHS_OWN or value is torch.nn.functional.scaled_dot_product_attention:
        return _REPLACED_TORCH, _REPLACED_TORCH
    if not isinstance(value, ModuleType):
        return None
    if "scaled_dot_product_attention" in names and value in _TORCH_MODULES:
        return _TORCH_MODULES[value], _REPLACED_TORCH
    if "memory_efficient_attention" in names and value.__name__ in ("xformers", "xformers.ops"):
        ops = getattr(value, "ops", value)
        exchanged = _ReplacedFunction(vars(ops), "memory_efficient_attention", XformersCall)
        replacement = Overlay(ops, memory_efficient_attention=exchanged)
        return (replacement if ops is value else Overlay(value, ops=replacement)), exchanged
    return None


@lru_cache(maxsize=256)
def _replacement_in_code(function: Any) -> CodeReplacement | None:
    """Return a function's replacement; None for code not in Python, without known attention, or that writes globals."""
    if not isinstance(function, FunctionType) or _writes(function.__code__, "GLOBAL"):
        return None
    namespace, names = function.__globals__, _names_in(function.__code__)
    instead, exchanged = {}, None
    for name in names:
        replacement = _replacement_of(name, namespace, names) if name in namespace else None
        if replacement is not None:
            instead[name], exchanged = replacement
    return None if exchanged is None else CodeReplacement(function, names, instead, exchanged)


@lru_cache(maxsize=256)
def _replacement_in_processor(kind: type) -> CodeReplacement | None:
    """Return the `CodeReplacement` of a processor class's ``__call__``; None if it has none or cannot share state."""
    # A copied processor shares the instance dictionary. Writes to attributes of a copied attention would be lost.
    replacement = _replacement_in_code(kind.__call__)
    if replacement is None or not kind.__dictoffset__ or _writes(replacement.function.__code__, "ATTR"):
        return None
    replacement = copy(replacement)
    replacement.processor = type(kind.__name__, (kind,), {"__call__": replacement.function})
    return replacement


def _writes(code: CodeType, kind: str) -> bool:
    """Return whether code or a function inside it sets or deletes a "GLOBAL", or an "ATTR" (attribute)."""
    if any(step.opname in (f"STORE_{kind}", f"DELETE_{kind}") for step in dis.get_instructions(code)):
        return True
    return any(_writes(value, kind) for value in code.co_consts if isinstance(value, CodeType))


def replacement_for(module: nn.Module) -> CodeReplacement | None:
    """Return the `CodeReplacement` of an attention's ``forward``, or else of its processor's ``__call__``, or None."""
    processor = type(getattr(module, "processor", None))
    return _replacement_in_code(type(module).forward) or _replacement_in_processor(processor)


@when_traced
def traced(kind: type, method: str) -> type[Overlay] | None:
    """Return a class of stand-ins for `kind`, the class of an attention or of a processor; None if there can be none.

    A call of an instance runs `method` as `kind` has it, but with its attention function replaced. That has to be one
    that graphs support, torch's or diffusers' dispatcher.
    """
    replacement = _replacement_in_code(getattr(kind, method))
    if replacement is None or replacement.replaced_function.read_call not in (TorchCall, DispatchCall):
        return None
    return replacement.stand_in


class InterceptTorch(TorchFunctionMode):
    """A context in which `current.answer`, if set, gets this thread's calls of torch's attention, as `TorchCall`."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is not TORCHS_OWN or current.answer is None:
            return func(*args, **(kwargs or {}))
        # not by its name: another extension's function may be there, and has called torch's own just now
        return current.answer(TorchCall(func, *args, **(kwargs or {})))
