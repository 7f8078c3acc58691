"""The attention function that a diffusers processor calls, exchanged for one call, and for nobody else.

A processor makes q, k and v and calls a function: `dispatch_attention_fn`, or torch's own. The very code of a known one
is run here with another function under that name; neither its class nor its module is changed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from types import FunctionType
from typing import Any, NamedTuple

import torch
import torch.nn.functional
from torch import nn

from ..compiling import when_traced
from ..sequence import BY_HEAD, BY_TOKEN, Host

_DISPATCH, _TORCH = "dispatch_attention_fn", "F"
# whose sequence is the one that `families` tells of, and who call the function once for it
KNOWN = frozenset(("AttnProcessor2_0", "FluxAttnProcessor", "FluxIPAdapterAttnProcessor", "FusedAttnProcessor2_0",
                   "FusedJointAttnProcessor2_0", "HunyuanVideoAttnProcessor2_0", "JointAttnProcessor2_0",
                   "LTXVideoAttnProcessor", "Lumina2AttnProcessor2_0", "QwenDoubleStreamAttnProcessor2_0",
                   "WanAttnProcessor", "ZSingleStreamAttnProcessor"))  # fmt: skip
_TAKES_BIAS = ("native", "_native_math", "_native_efficient")  # of diffusers' backends, on every device


class Options(NamedTuple):
    """How a processor calls its function. by_head: are q, k and v ``[B, H, S, d]``? scale: None for the function's own.

    gqa: may k and v have fewer heads? backend: of diffusers', "" for the one in force.
    """

    by_head: bool
    scale: float | None
    gqa: bool
    backend: str


class Given(NamedTuple):
    """What a processor gives its attention function. function: ``(q, k, v, bias) -> out``, that very one.

    mask: as it came along; plain: does the call ask for nothing but attention? active: the backend in force.
    """

    function: Callable[..., torch.Tensor]
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mask: torch.Tensor | None
    options: Options
    plain: bool
    active: Callable[[], str] = lambda: "native"

    @property
    def form(self) -> str:
        """Of q, k, v and out."""
        return BY_HEAD if self.options.by_head else BY_TOKEN

    @property
    def host(self) -> Host:
        """The function, as `sequence` is told of it."""
        scale = self.options.scale or self.q.shape[-1] ** -0.5
        takes_bias = (self.options.backend or self.active()) in _TAKES_BIAS
        return Host(self.function, self.form, self.form, scale, takes_bias)


class _Now(threading.local):
    def __init__(self) -> None:
        # in each thread's own dictionary, where a graph that was made by a thread's first call looks for it again
        self.answer: Callable[[Given], torch.Tensor] | None = None


_now = _Now()


@contextmanager
def answering(answer: Callable[[Given], torch.Tensor] | None) -> Iterator[None]:
    """While in here, what this thread's exchanged processors ask is asked of ``answer``; of the function for None."""
    before, _now.answer = _now.answer, answer
    try:
        yield
    finally:
        _now.answer = before


def exchange_processor(attention: nn.Module) -> Any:
    """Stands in for the attention in its own ``forward``: the same, with a processor that asks `answering`.

    A sentence's end on why not, where the processor is not known.
    """
    processor = getattr(attention, "processor", None)
    kind = _asking(type(processor))
    if kind is None:
        return f"{type(processor).__name__} is no processor that is known"
    return _With(attention, kind(processor))


def ask_again(
    processor: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, options: Options
) -> torch.Tensor:
    """What an exchanged processor of this kind has asked while it was traced, as it asks in eager code."""
    more = {"backend": options.backend} if options.backend else {}
    return _asking(type(processor)).function(
        q, k, v, attn_mask=mask, scale=options.scale, enable_gqa=options.gqa, **more
    )


class _With:
    """An attention with another processor."""

    def __init__(self, attention: nn.Module, processor: Any) -> None:
        self._attention, self.processor = attention, processor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._attention, name)


class _Asking:
    """A processor with another function. Classes made of it have ``__call__``, and ``function`` that it calls."""

    function: Callable[..., torch.Tensor]

    def __init__(self, processor: Any) -> None:
        self._processor = processor
        # for those who ask which arguments it takes, which a compiler cannot tell of a function that is made here
        self.__call__ = processor.__call__

    def __getattr__(self, name: str) -> Any:
        return getattr(self._processor, name)


@when_traced
def _asking(kind: type) -> type | None:
    """A class whose code is the processor's, but for the function that it calls."""
    return _make(kind)


@lru_cache(maxsize=256)
def _make(kind: type) -> type | None:
    call = kind.__call__
    if kind.__name__ not in KNOWN or not isinstance(call, FunctionType) or "diffusers" not in kind.__module__:
        return None
    # without its module's name, by which a compiler would look there for what is exchanged here
    own = {name: one for name, one in call.__globals__.items() if name != "__name__"}
    if _DISPATCH in call.__code__.co_names:
        function = instead = _Dispatch(call.__globals__)
        own[_DISPATCH] = instead
    elif _TORCH in call.__code__.co_names:
        instead = _Functional()
        function, own[_TORCH] = instead.scaled_dot_product_attention, instead
    else:
        return None
    made = FunctionType(call.__code__, own, call.__name__, call.__defaults__, call.__closure__)
    made.__kwdefaults__, made.__annotations__ = call.__kwdefaults__, call.__annotations__
    return type(kind.__name__, (_Asking,), {"__call__": made, "function": staticmethod(function)})


class _Dispatch:
    """diffusers' `dispatch_attention_fn`, looked up anew at each call."""

    def __init__(self, own: dict[str, Any]) -> None:
        self._own = own

    def __call__(self, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None,
                 enable_gqa=False, attention_kwargs=None, *, backend=None, parallel_config=None):  # fmt: skip
        def function(q, k, v, bias):
            more = {"attention_kwargs": attention_kwargs} if attention_kwargs else {}
            if parallel_config is not None:  # which diffusers 0.35 does not know
                more["parallel_config"] = parallel_config
            return self._own[_DISPATCH](
                q, k, v, attn_mask=bias, dropout_p=dropout_p, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa,
                backend=backend, **more,
            )  # fmt: skip

        plain = not (dropout_p or is_causal or attention_kwargs or parallel_config is not None)
        options = Options(False, scale, enable_gqa, "" if backend is None else str(getattr(backend, "value", backend)))
        return _answer(Given(function, query, key, value, attn_mask, options, plain, self._active))

    def _active(self) -> str:
        """The backend in force."""
        registry = self._own[_DISPATCH].__globals__.get("_AttentionBackendRegistry")
        chosen = registry.get_active_backend()[0] if registry is not None else "native"
        return str(getattr(chosen, "value", chosen))


class _Functional:
    """torch.nn.functional, but for its attention."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.nn.functional, name)

    @staticmethod
    def scaled_dot_product_attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None,
                                     enable_gqa=False):  # fmt: skip
        """``[B, H, S, d]``."""
        more = {"enable_gqa": True} if enable_gqa else {}

        def function(q, k, v, bias):
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, attn_mask=bias, dropout_p=dropout_p, is_causal=is_causal, scale=scale, **more
            )

        options = Options(True, scale, enable_gqa, "")
        return _answer(Given(function, query, key, value, attn_mask, options, not (dropout_p or is_causal)))


def _answer(given: Given) -> torch.Tensor:
    if _now.answer is None:
        return given.function(given.q, given.k, given.v, given.mask)
    return _now.answer(given)
