"""The attention function that a module's code calls, exchanged for one call, and for nobody else.

An attention is known by the function it calls, whatever its class or its processor is called. The very code is run here
with another function under the name by which it finds its own; neither class nor module is changed, so hooks on
projections, processors and stores see all tokens, as unmerged. If no name leads there (a wrapper of another extension
stands in between, or the code calls a helper), torch's own function is watched instead, which is slower.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
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

_TORCH = torch._C._nn.scaled_dot_product_attention
_TAKES_BIAS = ("native", "_native_math", "_native_efficient")  # of diffusers' backends, on every device
MORE = "it is more than attention (dropout, causal, or over several devices)"

Answer = Callable[["Asked"], torch.Tensor]


class _Now(threading.local):
    def __init__(self) -> None:
        # in each thread's own dictionary, where a graph that was made by a thread's first call looks for it again
        self.answer: Answer | None = None


_now = _Now()


def answering(answer: Answer | None) -> Answer | None:
    """From now on this thread's exchanged functions ask ``answer``, none for None. Returns what they asked before."""
    before, _now.answer = _now.answer, answer
    return before


class Asked:
    """One call of an attention function that has not been computed.

    q, k, v: views ``[B, S, H, d]``. mask: as it came along. scale: as it came, None for the function's own. plain: the
    call asks for nothing but attention. by_head, gqa, backend: what an operator of a compiled graph is told besides.
    is_flat: heads lie within the batch, until `split`.
    """

    by_head, gqa, backend = False, False, ""
    is_flat = False
    plain = True
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
        found = try_once(self.key(), self.compute, self.own_scale(), self.q, self.key())
        return None if found == NO_ATTENTION else found == ADDS_BIAS

    def key(self) -> tuple:
        """What tells the function from all others."""
        raise NotImplementedError

    def own_scale(self) -> float:
        """What the logits are multiplied by."""
        return self.q.shape[-1] ** -0.5 if self.scale is None else self.scale

    def attention(self, takes_bias: bool) -> Attention:
        """The call, as the engine is told of it."""
        return Attention(self.q, self.k, self.v, self.compute, self.own_scale(), takes_bias)


class _ByTorch(Asked):
    """torch's function, ``[B, H, S, d]`` or ``[B*H, S, d]``."""

    by_head = True

    def __init__(self, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None,
                 enable_gqa=False):  # fmt: skip
        self._own = query, key, value, attn_mask, dropout_p, is_causal
        self._more = {"scale": scale, "enable_gqa": True} if enable_gqa else {"scale": scale}
        self.mask, self.scale, self.gqa = attn_mask, scale, enable_gqa
        self.plain = not (dropout_p or is_causal) and query.dim() == 4
        if query.dim() == 4:
            self.q, self.k, self.v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        else:
            self.q, self.k, self.v = (one.unsqueeze(-2) for one in (query, key, value))

    def unmerged(self) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(*self._own, **self._more)

    def compute(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        function = torch.nn.functional.scaled_dot_product_attention
        return function(q, k, v, bias, *self._own[4:], **self._more).transpose(1, 2)

    def give_back(self, out: torch.Tensor) -> torch.Tensor:
        return out.transpose(1, 2)

    def takes_bias(self) -> bool | None:
        return True if torch.nn.functional.scaled_dot_product_attention is _TORCH else super().takes_bias()

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
        self._function, self._own, self._more = function, (query, key, value), {"scale": scale, **more}
        self.mask, self.scale = attn_bias, scale
        self.plain = not p and not set(more) - {"op"}
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

    def takes_bias(self) -> bool | None:
        return False

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
            self.q, self.k, self.v = (one.unflatten(-1, (-1, width)) for one in (q, k, v))

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


# --- exchanged functions ----------------------------------------------------------------------------------------------


def _torchs(*args: Any, **kwargs: Any) -> torch.Tensor:
    if _now.answer is None:
        return torch.nn.functional.scaled_dot_product_attention(*args, **kwargs)
    return _now.answer(_ByTorch(*args, **kwargs))


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
        return function(*args, **kwargs) if _now.answer is None else _now.answer(self._asked(function, *args, **kwargs))


# by the name under which code finds its function, see `register_name`
_BY_NAME: dict[str, Callable[..., Asked]] = {"dispatch_attention_fn": _ByDispatch}


def register_name(name: str, asked: Callable[..., Asked] = ByHeads) -> None:
    """Make known that a global of this name is an attention function. asked: reads its arguments."""
    _BY_NAME[name] = asked
    _code_of.cache_clear()
    _processor_class.cache_clear()


class Code:
    """The code of a function with another attention function in the place of its own.

    function: to be called. again: the exchanged function, which the operator of a compiled graph asks.
    """

    def __init__(self, inner: FunctionType) -> None:
        self._own = inner.__globals__
        self._names, instead = _names_in(inner.__code__), {}
        self.again: Callable | None = None
        for name in self._names:
            if name in self._own:
                found = _instead_of(name, self._own, self._names)
                if found is not None:
                    instead[name], self.again = found
        self.is_exchanged = bool(instead)
        self._names = [name for name in self._names if name not in instead]
        # without its module's name, by which a compiler would look there for what is exchanged here
        self._globals = {name: one for name, one in self._own.items() if name != "__name__"} | instead
        made = FunctionType(inner.__code__, self._globals, inner.__name__, inner.__defaults__, inner.__closure__)
        made.__kwdefaults__, made.__annotations__ = inner.__kwdefaults__, inner.__annotations__
        self.function = made

    def follow(self) -> None:
        """Take over what the module's globals hold now: hosts exchange them."""
        own, mine = self._own, self._globals
        for name in self._names:
            if name in own:
                mine[name] = own[name]


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
    """None if no name in the function leads to an attention function."""
    code = Code(function) if isinstance(function, FunctionType) else None
    return code if code is not None and code.is_exchanged else None


@lru_cache(maxsize=256)
def _processor_class(kind: type) -> type | None:
    """A class of processors whose code is this one's but for the attention function; None if that cannot be."""
    code = _code_of(kind.__call__)
    return None if code is None else type(kind.__name__, (kind,), {"__call__": code.function, "exchanged_code": code})


class Way(NamedTuple):
    """How an attention's own code is run with another function: the code, and the class of its processor if it is in
    one.
    """

    code: Code
    processor: type | None = None

    def run(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """The attention's output, its function asked of `answering`."""
        self.code.follow()
        if self.processor is None:
            return self.code.function(module, *args, **kwargs)
        return type(module).forward(_borrow(module, self.processor), *args, **kwargs)


def way_of(module: nn.Module) -> Way | None:
    """None if no name in the attention's code leads to its function."""
    code = _code_of(type(module).forward)
    if code is not None:
        return Way(code)
    processor = getattr(module, "processor", None)
    kind = None if processor is None else _processor_class(type(processor))
    return None if kind is None else Way(kind.exchanged_code, kind)


def _borrow(module: nn.Module, kind: type) -> nn.Module:
    """The attention with an exchanged processor: other objects over the same attributes."""
    processor, one = object.__new__(kind), object.__new__(type(module))
    processor.__dict__ = vars(module.processor)
    vars(one).update(vars(module))
    vars(one)["processor"] = processor
    return one


class Watching(TorchFunctionMode):
    """While it is in force, torch's attention function is asked of `answering`, whoever calls it."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is _TORCH and _now.answer is not None:
            return _now.answer(_ByTorch(*args, **(kwargs or {})))
        return func(*args, **(kwargs or {}))


# --- in a graph that is being made ------------------------------------------------------------------------------------


class TracedAttention:
    """An attention with another processor, which a compiler can follow."""

    def __init__(self, attention: nn.Module, processor: Any) -> None:
        self._attention, self.processor = attention, processor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._attention, name)


class _TracedProcessor:
    """A processor with another function. Classes made of it have its ``__call__``."""

    def __init__(self, processor: Any) -> None:
        self._processor = processor
        # for those who ask which arguments it takes, which a compiler cannot tell of a function that is made here
        self.__call__ = processor.__call__

    def __getattr__(self, name: str) -> Any:
        return getattr(self._processor, name)


@lru_cache(maxsize=256)
def _traced_class(kind: type) -> type | None:
    code = _code_of(kind.__call__)
    return None if code is None else type(kind.__name__, (_TracedProcessor,), {"__call__": code.function})


@when_traced
def traced_function(kind: type) -> Any:
    """For a graph: the forward of this class of attentions with another function; None if that cannot be."""
    code = _code_of(kind.forward)
    return code and code.function


@when_traced
def traced_processor(kind: type) -> Any:
    """For a graph: a class of processors with another function; None if that cannot be."""
    return _traced_class(kind)
