"""The attention function that a module's code calls, exchanged for one call, and for nobody else.

An attention is known by the function it calls, whatever its class or its processor is called. The very code is run with
another function under the name by which it finds its own; neither class nor module is changed, so hooks and processors
see all tokens. If no name leads there (a wrapper of another extension stands in between, or the code calls a helper),
torch's own function is watched instead, which is slower.
"""

from __future__ import annotations

import dis
import threading
from collections.abc import Callable, Hashable, Sequence
from copy import copy
from functools import lru_cache
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
import torch.nn.functional
from torch import nn
from torch.overrides import TorchFunctionMode

from ..attention.by_hand import full_name
from ..attention.functions import ADDS_BIAS, NO_ATTENTION, try_once
from ..attention.merged import Attention
from ..compiling import when_traced
from ..engine.decision import Call
from ..engine.state import State
from ..merging.grid import Layout
from ..reporting.ledger import MASKED, NO_GRID

_TORCH = torch._C._nn.scaled_dot_product_attention
_TAKES_BIAS = ("native", "_native_math", "_native_efficient")  # of diffusers' backends, on every device
_OPTIONS = ("dropout_p", "is_causal", "scale", "enable_gqa", "attention_kwargs")
MORE = "it is more than attention (dropout, causal, or over several devices)"
REFUSES = "its attention function refuses merged keys"
# hosts interrupt a picture by exceptions of their own, which are none of these
_REFUSALS = (ArithmeticError, AssertionError, LookupError, RuntimeError, TypeError, ValueError)


class _Now(threading.local):
    """answer: whom this thread's exchanged functions ask, if anybody."""

    def __init__(self) -> None:
        # in each thread's own dictionary, where a graph that was made by a thread's first call looks for it again
        self.answer: Callable[[Asked], torch.Tensor] | None = None


now = _Now()


class Asked:
    """One call of an attention function that has not been computed.

    q, k, v: views ``[B, S, H, d]``. mask: as it came along. scale: as it came, None for the function's own. plain: the
    call asks for nothing but attention. by_head: its function takes ``[B, H, S, d]``; gqa, backend: what an operator of
    a compiled graph is told besides. is_flat: heads lie within the batch, until `split`. adds_bias: the function does,
    if that is known without asking. Subclasses keep the call as it came in ``_function``, ``_own`` and ``_more``.
    """

    by_head, gqa, backend, is_flat, plain = False, False, "", False, True
    adds_bias: bool | None = None
    mask: torch.Tensor | None = None
    scale: float | None = None
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    def unmerged(self) -> torch.Tensor:
        """What the host's function gives, in its own form."""
        return self._function(*self._own, self.mask, **self._more)

    def compute(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """The host's function on other tensors, all ``[B, S, H, d]``."""
        if not self.by_head:
            return self._function(q, k, v, bias, **self._more)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        return self._function(q, k, v, bias, **self._more).transpose(1, 2)

    def give_back(self, out: torch.Tensor) -> torch.Tensor:
        """``[B, S, H, d]`` in the form in which the host's function returns it."""
        return out.transpose(1, 2) if self.by_head else out

    def takes_bias(self) -> bool | None:
        """Does the function add a bias? None if it is no attention."""
        scale = self.q.shape[-1] ** -0.5 if self.scale is None else self.scale
        found = try_once(self.key(), self.compute, scale, self.q, self.key())
        return None if found == NO_ATTENTION else found == ADDS_BIAS

    def key(self) -> tuple:
        """What tells the function from all others."""
        return (self._function,)


class _ByTorch(Asked):
    """torch's function, ``[B, H, S, d]`` or ``[B*H, S, d]``; or one like it."""

    by_head = True

    def __init__(self, function, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None,
                 enable_gqa=False, attention_kwargs=None, **more):  # fmt: skip
        self._function, self._own, self._more = function, (query, key, value), more
        for name, one in zip(_OPTIONS, (dropout_p, is_causal, scale, enable_gqa, attention_kwargs), strict=True):
            if one:  # a replacement may know no more than is asked
                more[name] = one
        self.mask, self.scale, self.gqa = attn_mask, scale, enable_gqa
        self.plain = not (dropout_p or is_causal) and query.dim() == 4
        if function is _TORCH:
            self.adds_bias = True
        if query.dim() == 3:
            self.q, self.k, self.v = (one.unsqueeze(-2) for one in self._own)
        elif self.by_head:
            self.q, self.k, self.v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        else:
            self.q, self.k, self.v = self._own


class _ByDispatch(_ByTorch):
    """diffusers' `dispatch_attention_fn`, ``[B, S, H, d]``, which looks up the backend in force at each call."""

    by_head = False

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        more = self._more
        self.backend = str(getattr(more.get("backend"), "value", more.get("backend") or ""))
        self.plain = self.plain and not more.get("attention_kwargs") and more.get("parallel_config") is None

    def takes_bias(self) -> bool | None:
        """As of every call; of known backends without a try."""
        _, backend, torchs = self.key()
        return True if torchs is _TORCH and backend in _TAKES_BIAS else super().takes_bias()

    def key(self) -> tuple:
        """With the backend in force."""
        registry = getattr(self._function, "__globals__", {}).get("_AttentionBackendRegistry")
        active = "native" if registry is None else registry.get_active_backend()[0]
        backend = self.backend or str(getattr(active, "value", active))
        return self._function, backend, torch.nn.functional.scaled_dot_product_attention


class _ByXformers(Asked):
    """``xformers.ops.memory_efficient_attention``, ``[B, S, H, d]`` or ``[B*H, S, d]``; its bias is never asked for."""

    adds_bias = False

    def __init__(self, function, query, key, value, attn_bias=None, p=0.0, scale=None, **more):
        self._function, self._own, self._more = function, (query, key, value), {"p": p, "scale": scale, **more}
        self.mask, self.scale = attn_bias, scale
        self.plain = not p and not set(more) - {"op"}
        self.is_flat = query.dim() == 3
        self.q, self.k, self.v = (one.unsqueeze(-2) if self.is_flat else one for one in self._own)

    def split(self, heads: int) -> None:
        """Tell apart the heads, as the function takes them too."""
        self.q, self.k, self.v = (one.unflatten(0, (-1, heads)).transpose(1, 2) for one in self._own)

    def give_back(self, out: torch.Tensor) -> torch.Tensor:
        """As it came."""
        return out.transpose(1, 2).flatten(0, 1) if self.is_flat else out


class ByHeads(Asked):
    """``function(q, k, v, heads, mask=None, ...)`` of ComfyUI, Forge and reForge: flat ``[B, S, H*d]``, or
    ``[B, H, S, d]`` if it skips the reshape. It is already bound to whatever else stands in between.
    """

    def __init__(self, function, q, k, v, heads, mask=None, attn_precision=None, skip_reshape=False,
                 skip_output_reshape=False, **more):  # fmt: skip
        self._function, self._own, self._heads, self._more = function, (q, k, v), heads, more
        self._in, self._out = skip_reshape, skip_output_reshape
        asked = {"attn_precision": attn_precision, "skip_reshape": skip_reshape, "skip_output_reshape": self._out}
        more.update((name, value) for name, value in asked.items() if value)
        self.mask, self.scale = mask, more.get("scale")
        if skip_reshape:
            self.q, self.k, self.v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        else:
            width = q.shape[-1] // heads
            # ComfyUI's SD3 hands over values whose heads are apart already
            self.q, self.k, self.v = (one.reshape(*one.shape[:2], -1, width) for one in (q, k, v))

    def unmerged(self) -> torch.Tensor:
        """As of every call."""
        return self._function(*self._own, self._heads, mask=self.mask, **self._more)

    def compute(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """As of every call."""
        q, k, v = (one.transpose(1, 2) if self._in else one.flatten(2) for one in (q, k, v))
        out = self._function(q, k, v, self._heads, mask=bias, **self._more)
        return out.transpose(1, 2) if self._out else out.unflatten(-1, (self._heads, -1))

    def give_back(self, out: torch.Tensor) -> torch.Tensor:
        """As it is to be returned."""
        return out.transpose(1, 2) if self._out else out.flatten(2)

    def key(self) -> tuple:
        """With the forms of the call."""
        return (self._function, self._in, self._out, self._heads)


# --- what is answered -------------------------------------------------------------------------------------------------


def answer(
    state: State, call: Call, name: Hashable, level: int, heads: int, where: Layout | Callable[[int], Layout | str],
    seen: list[bool], asked: Asked,
) -> torch.Tensor:  # fmt: skip
    """What an attention function would have given, in its host's form.

    Args:
        state, call, name, level: as of `State.attend`.
        heads: of the attention, if they lie within the batch.
        where: the picture's tokens, if there are no others; else tells where they lie among so many, or why that is not
            known.
        seen: an entry is added: is it to the tokens themselves?
        asked: the call.
    """
    if asked.is_flat:
        asked.split(heads)
    q, k, v = asked.q, asked.k, asked.v
    is_own = k.shape[:2] == q.shape[:2]
    seen.append(is_own)
    if not is_own:  # to a prompt, or to a picture that an adapter has brought
        return asked.unmerged()
    rows, why = (None, "") if asked.mask is None else _rows_seen(asked.mask, q)
    tokens = q.shape[1] if rows is None else len(rows)
    if not isinstance(where, Layout):
        where = where(tokens)
    elif where.grid.height * where.grid.width != tokens:
        where = NO_GRID
    why = why or (where if isinstance(where, str) else "" if asked.plain else MORE)
    why = why or (state.refused and state.refused.get(asked.key(), ""))
    takes_bias = asked.adds_bias
    if takes_bias is None and not why:
        takes_bias = asked.takes_bias()
        own = full_name([*filter(callable, asked.key())][-1])
        why = f"the function that it calls is no attention: {own}" if takes_bias is None else ""
    if why:
        state.leave_alone(call, level, why, q.shape[0], q.shape[1], k.shape[1])
        return asked.unmerged()
    if rows is not None:
        q, k, v = q[:, rows], k[:, rows], v[:, rows]
    scale = q.shape[3] ** -0.5 if asked.scale is None else asked.scale
    try:
        out = state.attend(call, name, level, where, Attention(q, k, v, asked.compute, scale, takes_bias))
    except _REFUSALS as error:
        if isinstance(error, torch.cuda.OutOfMemoryError) or "out of memory" in str(error):
            raise
        given = asked.unmerged()  # before it is believed: what fails unmerged too is no refusal
        told = f"{type(error).__name__}: {' '.join(str(error).split())[:80]}"
        why = state.refused[asked.key()] = f"{REFUSES} ({told})"
        state.leave_alone(call, level, why, q.shape[0], q.shape[1], k.shape[1])
        return given
    if out is None:
        return asked.unmerged()
    if rows is not None:
        whole = out.new_zeros(out.shape[0], asked.q.shape[1], *out.shape[2:])
        whole[:, rows] = out  # DirectML has no index_copy
        out = whole
    return asked.give_back(out)


def _rows_seen(mask: torch.Tensor, q: torch.Tensor) -> tuple[torch.Tensor | None, str]:
    """Which tokens a mask leaves, as indices, None for all of them; and why that is not known. It waits for the device.

    Tokens that nobody sees are padding, whose own outputs nobody sees either; a mask for each pair of tokens says the
    same where those that it leaves see all of each other and nothing else.
    """
    tokens, masks = q.shape[1], len(mask)
    is_square = mask.numel() == masks * tokens**2
    if mask.dtype != torch.bool or mask.shape[-1] != tokens or not (is_square or mask.numel() == masks * tokens):
        return None, MASKED
    pairs = mask.reshape(masks, -1, tokens)
    rows = pairs.diagonal(dim1=1, dim2=2) if is_square else pairs[:, 0]
    seen = rows * rows.sum(1, keepdim=True)
    if is_square and not ((pairs.sum(1) == seen) & (pairs.sum(2) == seen)).all():
        return None, MASKED
    if rows.all():
        return None, ""
    are_equal = bool((rows == rows[:1]).all())
    return (rows[0].nonzero()[:, 0], "") if are_equal else (None, "a mask hides other tokens in each picture")


# --- exchanged functions ----------------------------------------------------------------------------------------------


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


_TORCHS = _Exchanged(vars(torch.nn.functional), "scaled_dot_product_attention", _ByTorch)
_FUNCTIONAL = Like(torch.nn.functional, scaled_dot_product_attention=_TORCHS)
_NN = Like(torch.nn, functional=_FUNCTIONAL)
_TORCH_MODULES = {torch.nn.functional: _FUNCTIONAL, torch.nn: _NN, torch: Like(torch, nn=_NN)}
# by the name under which code finds its function, see `register_name`
_BY_NAME: dict[str, Callable[..., Asked]] = {"dispatch_attention_fn": _ByDispatch}


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
        made = FunctionType(inner.__code__, self._globals, inner.__name__, inner.__defaults__, inner.__closure__)
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
    if value is _TORCH or value is torch.nn.functional.scaled_dot_product_attention:
        return _TORCHS, _TORCHS
    if not isinstance(value, ModuleType):
        return None
    if "scaled_dot_product_attention" in names and value in _TORCH_MODULES:
        return _TORCH_MODULES[value], _TORCHS
    if "memory_efficient_attention" in names and value.__name__ in ("xformers", "xformers.ops"):
        ops = getattr(value, "ops", value)
        exchanged = _Exchanged(vars(ops), "memory_efficient_attention", _ByXformers)
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
    return way.stand_in if way is not None and way.again.asked in (_ByTorch, _ByDispatch) else None


class Watching(TorchFunctionMode):
    """While it is in force, torch's attention function is asked of `now.answer`, whoever calls it."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        is_asked = func is _TORCH and now.answer is not None
        return (_TORCHS if is_asked else func)(*args, **(kwargs or {}))
