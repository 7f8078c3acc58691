"""The attention function that a module's code calls, exchanged for one call, and for nobody else.

An attention is known by the function it calls, whatever its class or its processor is called. The very code is run here
with another function under the name by which it finds its own; neither class nor module is changed, so hooks on
projections, processors and stores see all tokens, as unmerged. If no name leads there (a wrapper of another extension
stands in between, or the code calls a helper), torch's own function is watched instead, which is slower.
"""

from __future__ import annotations

import dis
import threading
from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
import torch.nn.functional
from torch import nn
from torch.overrides import TorchFunctionMode

from ..attention.functions import ADDS_BIAS, NO_ATTENTION, try_once
from ..attention.merged import Attention
from ..compiling import when_traced
from ..engine.decision import Call
from ..engine.state import State
from ..merging.layout import Layout
from ..reporting.reasons import MASKED, NO_GRID

_TORCH = torch._C._nn.scaled_dot_product_attention
_TAKES_BIAS = ("native", "_native_math", "_native_efficient")  # of diffusers' backends, on every device
MORE = "it is more than attention (dropout, causal, or over several devices)"
_NOT_ATTENTION = "the function that it calls is no attention"

Answer = Callable[["Asked"], torch.Tensor]


class _Now(threading.local):
    """answer: whom this thread's exchanged functions ask, if anybody."""

    def __init__(self) -> None:
        # in each thread's own dictionary, where a graph that was made by a thread's first call looks for it again
        self.answer: Answer | None = None


now = _Now()


class Asked:
    """One call of an attention function that has not been computed.

    q, k, v: views ``[B, S, H, d]``. mask: as it came along. scale: as it came, None for the function's own. plain: the
    call asks for nothing but attention. by_head, gqa, backend: what an operator of a compiled graph is told besides.
    is_flat: heads lie within the batch, until `split`. adds_bias: the function does, if that is known without asking.
    """

    by_head, gqa, backend = False, False, ""
    is_flat = False
    plain = True
    adds_bias: bool | None = None
    mask: torch.Tensor | None = None
    scale: float | None = None
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    def split(self, heads: int) -> None:
        """Tell apart heads that lie within the batch, as some hosts hand them over."""

    def unmerged(self) -> torch.Tensor:
        """What the host's function gives, in its own form."""
        raise NotImplementedError

    def compute(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """The host's function on other tensors, all ``[B, S, H, d]``."""
        raise NotImplementedError

    def give_back(self, out: torch.Tensor) -> torch.Tensor:
        """``[B, S, H, d]`` in the form in which the host's function returns it."""
        return out

    def takes_bias(self) -> bool | None:
        """Does the function add a bias? None if it is no attention."""
        scale = self.q.shape[-1] ** -0.5 if self.scale is None else self.scale
        found = try_once(self.key(), self.compute, scale, self.q, self.key())
        return None if found == NO_ATTENTION else found == ADDS_BIAS

    def key(self) -> tuple:
        """What tells the function from all others."""
        raise NotImplementedError


class _ByTorch(Asked):
    """torch's function, ``[B, H, S, d]`` or ``[B*H, S, d]``."""

    by_head = True

    def __init__(self, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None,
                 enable_gqa=False):  # fmt: skip
        self._own = query, key, value
        more = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
        self._more = {name: one for name, one in more.items() if one}  # a replacement may know no more than is asked
        self.mask, self.scale, self.gqa = attn_mask, scale, enable_gqa
        self.plain = not (dropout_p or is_causal) and query.dim() == 4
        if torch.nn.functional.scaled_dot_product_attention is _TORCH:
            self.adds_bias = True
        if query.dim() == 4:
            self.q, self.k, self.v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        else:
            self.q, self.k, self.v = (one.unsqueeze(-2) for one in (query, key, value))

    def unmerged(self) -> torch.Tensor:
        return self._call(*self._own, self.mask)

    def compute(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return self._call(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), bias).transpose(1, 2)

    def _call(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        more = self._more if mask is None else {"attn_mask": mask, **self._more}
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, **more)

    def give_back(self, out: torch.Tensor) -> torch.Tensor:
        return out.transpose(1, 2)

    def key(self) -> tuple:
        return (torch.nn.functional.scaled_dot_product_attention,)


class _ByDispatch(Asked):
    """diffusers' `dispatch_attention_fn`, ``[B, S, H, d]``, which looks up the backend in force at each call."""

    def __init__(self, dispatch, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None,
                 enable_gqa=False, attention_kwargs=None, *, backend=None, parallel_config=None):  # fmt: skip
        self._dispatch, self._backend = dispatch, backend
        more = {"attention_kwargs": attention_kwargs} if attention_kwargs else {}
        if parallel_config is not None:  # which diffusers 0.35 does not know
            more["parallel_config"] = parallel_config
        self._more = dict(dropout_p=dropout_p, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa,
                          backend=backend, **more)  # fmt: skip
        self.q, self.k, self.v = query, key, value
        self.mask, self.scale, self.gqa = attn_mask, scale, enable_gqa
        self.backend = "" if backend is None else str(getattr(backend, "value", backend))
        self.plain = not (dropout_p or is_causal or attention_kwargs or parallel_config is not None)

    def unmerged(self) -> torch.Tensor:
        return self._dispatch(self.q, self.k, self.v, attn_mask=self.mask, **self._more)

    def compute(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return self._dispatch(q, k, v, attn_mask=bias, **self._more)

    def takes_bias(self) -> bool | None:
        is_torchs = torch.nn.functional.scaled_dot_product_attention is _TORCH
        return True if is_torchs and self._active() in _TAKES_BIAS else super().takes_bias()

    def key(self) -> tuple:
        return self._dispatch, self._active(), torch.nn.functional.scaled_dot_product_attention

    def _active(self) -> str:
        if self.backend:
            return self.backend
        registry = getattr(self._dispatch, "__globals__", {}).get("_AttentionBackendRegistry")
        chosen = registry.get_active_backend()[0] if registry is not None else "native"
        return str(getattr(chosen, "value", chosen))


class _ByXformers(Asked):
    """``xformers.ops.memory_efficient_attention``, ``[B, S, H, d]`` or ``[B*H, S, d]``; its bias is never asked for."""

    def __init__(self, function, query, key, value, attn_bias=None, p=0.0, scale=None, **more):
        self._function, self._own, self._more = function, (query, key, value), {"p": p, "scale": scale, **more}
        self.mask, self.scale = attn_bias, scale
        self.plain, self.adds_bias = not p and not set(more) - {"op"}, False
        self.is_flat = query.dim() == 3
        self.q, self.k, self.v = (one.unsqueeze(-2) if self.is_flat else one for one in (query, key, value))

    def split(self, heads: int) -> None:
        if self.is_flat:
            self.q, self.k, self.v = (one.unflatten(0, (-1, heads)).transpose(1, 2) for one in self._own)

    def unmerged(self) -> torch.Tensor:
        return self._function(*self._own, attn_bias=self.mask, **self._more)

    def compute(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if not self.is_flat:
            return self._function(q, k, v, attn_bias=bias, **self._more)
        batch, _, heads, _ = q.shape
        q, k, v = (one.transpose(1, 2).flatten(0, 1) for one in (q, k, v))
        return self._function(q, k, v, attn_bias=bias, **self._more).unflatten(0, (batch, heads)).transpose(1, 2)

    def give_back(self, out: torch.Tensor) -> torch.Tensor:
        return out.transpose(1, 2).flatten(0, 1) if self.is_flat else out

    def key(self) -> tuple:
        return (self._function,)


class ByHeads(Asked):
    """A host's ``function(q, k, v, heads, mask=None, ...)``, flat ``[B, S, H*d]``, or ``[B, H, S, d]`` if it skips the
    reshape: ComfyUI's, Forge's and reForge's.

    function: already bound to whatever else stands in between.
    """

    def __init__(self, function, q, k, v, heads, mask=None, attn_precision=None, skip_reshape=False,
                 skip_output_reshape=False, **more):  # fmt: skip
        self._function, self._own, self._heads = function, (q, k, v), heads
        self._more = more
        if attn_precision is not None:
            self._more["attn_precision"] = attn_precision
        self._in, self._out = skip_reshape, skip_output_reshape
        for name, value in (("skip_reshape", skip_reshape), ("skip_output_reshape", skip_output_reshape)):
            if value:
                self._more[name] = value
        self.mask, self.scale = mask, more.get("scale")
        if skip_reshape:
            self.q, self.k, self.v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        else:
            width = q.shape[-1] // heads
            # ComfyUI's SD3 hands over values whose heads are apart already
            self.q, self.k, self.v = (one.reshape(*one.shape[:2], -1, width) for one in (q, k, v))

    def unmerged(self) -> torch.Tensor:
        return self._function(*self._own, self._heads, mask=self.mask, **self._more)

    def compute(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        q, k, v = (one.transpose(1, 2) if self._in else one.flatten(2) for one in (q, k, v))
        out = self._function(q, k, v, self._heads, mask=bias, **self._more)
        return out.transpose(1, 2) if self._out else out.unflatten(-1, (self._heads, -1))

    def give_back(self, out: torch.Tensor) -> torch.Tensor:
        return out.transpose(1, 2) if self._out else out.flatten(2)

    def key(self) -> tuple:
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
    q, k, mask, rows, why = asked.q, asked.k, asked.mask, None, ""
    is_own = k.shape[:2] == q.shape[:2]
    seen.append(is_own)
    if not is_own:  # to a prompt, or to a picture that an adapter has brought
        return asked.unmerged()
    if mask is not None:
        rows = _rows_seen(mask, q)
        why, rows = (rows, None) if isinstance(rows, str) else ("", rows)
    tokens = q.shape[1] if rows is None else len(rows)
    if not isinstance(where, Layout):
        where = where(tokens)
        why = why or (where if isinstance(where, str) else "")
    elif where.grid.height * where.grid.width != tokens:
        why = why or NO_GRID
    if not asked.plain:
        why = why or MORE
    takes_bias = asked.adds_bias
    if takes_bias is None and not why:
        takes_bias = asked.takes_bias()
        why = _NOT_ATTENTION if takes_bias is None else ""
    if why:
        state.leave_alone(call, level, why, q.shape[0], q.shape[1], k.shape[1])
        return asked.unmerged()
    scale = q.shape[3] ** -0.5 if asked.scale is None else asked.scale
    attention = Attention(q, k, asked.v, asked.compute, scale, takes_bias)
    if rows is not None:
        attention = attention._replace(**{one: getattr(attention, one)[:, rows] for one in "qkv"})
    out = state.attend(call, name, level, where, attention)
    if out is None:
        return asked.unmerged()
    return asked.give_back(out if rows is None else _spread(out, rows, q.shape[1]))


def _rows_seen(mask: torch.Tensor, q: torch.Tensor) -> torch.Tensor | str | None:
    """Which tokens a mask leaves, as indices; None for all of them. It waits for the device.

    Tokens that nobody sees are padding, whose own outputs nobody sees either.
    """
    if mask.dtype != torch.bool or mask.shape[-1] != q.shape[1] or mask.numel() != mask.shape[0] * mask.shape[-1]:
        return MASKED
    rows = mask.reshape(mask.shape[0], -1)
    if rows.all():
        return None
    return rows[0].nonzero()[:, 0] if (rows == rows[:1]).all() else "a mask hides other tokens in each picture"


def _spread(out: torch.Tensor, rows: torch.Tensor, tokens: int) -> torch.Tensor:
    """With zeros for the tokens that were left out."""
    whole = out.new_zeros(out.shape[0], tokens, *out.shape[2:])
    whole[:, rows] = out
    return whole


# --- exchanged functions ----------------------------------------------------------------------------------------------


def _torchs(*args: Any, **kwargs: Any) -> torch.Tensor:
    if now.answer is None:
        return torch.nn.functional.scaled_dot_product_attention(*args, **kwargs)
    return now.answer(_ByTorch(*args, **kwargs))


class _InPlaceOf:
    """Stands in for a module of Python's: the same, but for these attributes."""

    def __init__(self, module: ModuleType, **instead: Any) -> None:
        self._module = module
        vars(self).update(instead)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class _Exchanged:
    """A host's function, which is asked of `answering` first. asked: makes the `Asked` of its arguments."""

    def __init__(self, own: dict[str, Any], name: str, asked: Callable[..., Asked]) -> None:
        self._own, self._name, self._asked = own, name, asked

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        function = self._own[self._name]  # looked up anew: hosts exchange it
        return function(*args, **kwargs) if now.answer is None else now.answer(self._asked(function, *args, **kwargs))


# by the name under which code finds its function, see `register_name`
_BY_NAME: dict[str, Callable[..., Asked]] = {"dispatch_attention_fn": _ByDispatch}


def register_name(name: str, asked: Callable[..., Asked] = ByHeads) -> None:
    """Make known that a global of this name is an attention function. asked: reads its arguments."""
    _BY_NAME[name] = asked
    _code_of.cache_clear()
    _processor_class.cache_clear()


class Code:
    """The code of a function with another attention function in the place of its own.

    function: to be called. own: the globals of its module. globals: those it has, which follow its own in these names.
    again: the exchanged function, which the operator of a compiled graph asks.
    """

    def __init__(self, inner: FunctionType) -> None:
        self.own = inner.__globals__
        self.names, instead = _names_in(inner.__code__), {}
        self.again: Callable | None = None
        for name in self.names:
            if name in self.own:
                found = _instead_of(name, self.own, self.names)
                if found is not None:
                    instead[name], self.again = found
        self.is_exchanged = bool(instead)
        self.names = [name for name in self.names if name not in instead]
        # without its module's name, by which a compiler would look there for what is exchanged here
        self.globals = {name: one for name, one in self.own.items() if name != "__name__"} | instead
        made = FunctionType(inner.__code__, self.globals, inner.__name__, inner.__defaults__, inner.__closure__)
        made.__kwdefaults__, made.__annotations__ = inner.__kwdefaults__, inner.__annotations__
        self.function = made


def _names_in(code: CodeType) -> list[str]:
    """The names that code and the functions inside it look up."""
    inside = (one for one in code.co_consts if isinstance(one, CodeType))
    return list(dict.fromkeys([*code.co_names, *(name for one in inside for name in _names_in(one))]))


def _instead_of(name: str, own: dict[str, Any], names: Sequence[str]) -> tuple[Any, Callable] | None:
    """What a global name of a code has to mean, and the exchanged function behind it; None for its own meaning."""
    value = own[name]
    if name in _BY_NAME:
        exchanged = _Exchanged(own, name, _BY_NAME[name])
        return exchanged, exchanged
    if value is _TORCH or value is torch.nn.functional.scaled_dot_product_attention:
        return _torchs, _torchs
    if not isinstance(value, ModuleType):
        return None
    if "scaled_dot_product_attention" in names:
        functional = _InPlaceOf(torch.nn.functional, scaled_dot_product_attention=_torchs)
        neural = _InPlaceOf(torch.nn, functional=functional)
        found = {torch.nn.functional: functional, torch.nn: neural, torch: _InPlaceOf(torch, nn=neural)}.get(value)
        return None if found is None else (found, _torchs)
    if "memory_efficient_attention" in names and value.__name__ in ("xformers", "xformers.ops"):
        ops = getattr(value, "ops", value)
        exchanged = _Exchanged(vars(ops), "memory_efficient_attention", _ByXformers)
        found = _InPlaceOf(ops, memory_efficient_attention=exchanged)
        return (found if ops is value else _InPlaceOf(value, ops=found)), exchanged
    return None


@lru_cache(maxsize=256)
def _code_of(function: Any) -> Code | None:
    """None if no name in the function leads to an attention function, or if it writes to globals."""
    if not isinstance(function, FunctionType) or _writes(function.__code__, "GLOBAL"):
        return None
    code = Code(function)
    return code if code.is_exchanged else None


@lru_cache(maxsize=256)
def _processor_class(kind: type) -> type | None:
    """A class of processors whose code is this one's but for the attention function.

    None if that cannot be: an object without a dictionary cannot be another's, and what code writes to attributes of
    the attention would be lost.
    """
    code = _code_of(kind.__call__)
    if code is None or not kind.__dictoffset__ or _writes(code.function.__code__, "ATTR"):
        return None
    return type(kind.__name__, (kind,), {"__call__": code.function, "exchanged_code": code})


def _writes(code: CodeType, what: str) -> bool:
    """Does code write to a "GLOBAL", or to an "ATTR" of anything but its first argument?"""
    target = None
    for one in dis.get_instructions(code):
        is_first = what == "ATTR" and code.co_varnames[:1] == (target,)
        if one.opname in (f"STORE_{what}", f"DELETE_{what}") and not is_first:
            return True
        target = one.argval[-1] if isinstance(one.argval, tuple) else one.argval
    return any(_writes(one, what) for one in code.co_consts if isinstance(one, CodeType))


class Way(NamedTuple):
    """How an attention's own code is run with another function: the code, and the class of its processor if it is in
    one.
    """

    code: Code
    processor: type | None = None

    def run(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """The attention's output, its function asked of ``now.answer``."""
        code, kind = self
        own, mine = code.own, code.globals
        for name in code.names:  # hosts exchange what their modules hold
            if name in own:
                mine[name] = own[name]
        if kind is None:
            return code.function(module, *args, **kwargs)
        # the attention with an exchanged processor: other objects over the same attributes
        processor, one = object.__new__(kind), object.__new__(type(module))
        processor.__dict__ = vars(module.processor)
        vars(one).update(vars(module))
        vars(one)["processor"] = processor
        return type(module).forward(one, *args, **kwargs)


def way_of(module: nn.Module) -> Way | None:
    """None if no name in the attention's code leads to its function."""
    code = _code_of(type(module).forward)
    if code is not None:
        return Way(code)
    processor = getattr(module, "processor", None)
    kind = None if processor is None else _processor_class(type(processor))
    return None if kind is None else Way(kind.exchanged_code, kind)


class Watching(TorchFunctionMode):
    """While it is in force, torch's attention function is asked of `answering`, whoever calls it."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is _TORCH and now.answer is not None:
            return now.answer(_ByTorch(*args, **(kwargs or {})))
        return func(*args, **(kwargs or {}))


# --- in a graph that is being made ------------------------------------------------------------------------------------


class _Traced:
    """An attention, in a way that a compiler can follow. Classes made of it have its forward as their ``__call__``."""

    def __init__(self, attention: nn.Module) -> None:
        self._attention = attention

    def __getattr__(self, name: str) -> Any:
        return getattr(self._attention, name)


class TracedAttention(_Traced):
    """The same with another processor."""

    def __init__(self, attention: nn.Module, processor: Any) -> None:
        self._attention, self.processor = attention, processor


class _TracedProcessor:
    """A processor with another function. Classes made of it have its ``__call__``."""

    def __init__(self, processor: Any) -> None:
        self._processor = processor
        # for those who ask which arguments it takes, which a compiler cannot tell of a function that is made here
        self.__call__ = processor.__call__

    def __getattr__(self, name: str) -> Any:
        return getattr(self._processor, name)


@lru_cache(maxsize=256)
def _traced_class(function: Any, name: str, base: type) -> type | None:
    code = _code_of(function)
    return None if code is None else type(name, (base,), {"__call__": code.function})


@when_traced
def traced_attention(kind: type) -> Any:
    """For a graph: a class of stand-ins for attentions of this class, whose ``__call__`` is their forward with another
    function; None if that cannot be.
    """
    return _traced_class(kind.forward, kind.__name__, _Traced)


@when_traced
def traced_processor(kind: type) -> Any:
    """For a graph: a class of processors with another function; None if that cannot be."""
    return _traced_class(kind.__call__, kind.__name__, _TracedProcessor)
