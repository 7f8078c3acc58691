"""Doubles of ComfyUI's attentions: how each scales and adds a mask; tests/hosts/comfyui tests the real ones alike."""

import functools
from typing import Any

import torch

from benchmarks import models
from tests.host_doubles.blocks import attend, of_heads

HERE = __name__
__name__ = "comfy.ldm.modules.attention"  # by which the engine knows them, like ComfyUI's own


def wrap_attn(function: Any) -> Any:
    """Let ``optimized_attention_override`` of the transformer_options take the call over, once."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> torch.Tensor:
        inside = "_inside_attn_wrapper" in kwargs
        kwargs["_inside_attn_wrapper"] = True
        override = (kwargs.get("transformer_options") or {}).get("optimized_attention_override")
        if inside or override is None:
            return function(*args, **kwargs)
        return override(function, *args, **kwargs)

    return wrapper


@wrap_attn
def attention_pytorch(q, k, v, heads, mask=None, attn_precision=None, **kwargs):
    """torch's function, which wants a mask of the queries' dtype, and broadcasts it."""
    return attend(q, k, v, heads, mask[:, None] if mask is not None and mask.dim() == 3 else mask)


def _by_products(name: str, casts: bool = True) -> Any:
    """A function of this name; if it ``casts``, it computes in the precision of the call's argument."""

    def function(q, k, v, heads, mask=None, attn_precision=None, **kwargs):
        q, k, v = (of_heads(tensor, heads) for tensor in (q, k, v))
        if casts and attn_precision is not None:
            q, k = q.to(attn_precision), k.to(attn_precision)
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        if mask is not None:
            assert mask.dim() in (3, 4) and mask.shape[-2] in (1, q.shape[2])
            scores += mask if mask.dim() == 4 else mask[:, None]
        return (scores.softmax(-1).to(v.dtype) @ v).transpose(1, 2).flatten(2)

    function.__name__ = function.__qualname__ = name
    return wrap_attn(function)


attention_basic, attention_split = _by_products("attention_basic"), _by_products("attention_split")
# both seem to add a mask; short of memory, sub_quad lets a group without tokens hold the maximum, and flash leaves
# it to another function, with a warning
attention_sub_quad, attention_flash = _by_products("attention_sub_quad"), _by_products("attention_flash", casts=False)
optimized_attention = attention_pytorch  # the current function, which models look up at each call


class CrossAttention(models.CrossAttention):
    """The double of ComfyUI's class, which calls the current function."""

    def forward(self, x, context=None, value=None, transformer_options=None):
        context = x if context is None else context
        q, k, v = self.to_q(x), self.to_k(context), self.to_v(context if value is None else value)
        return self.to_out(optimized_attention(q, k, v, self.heads, transformer_options=transformer_options))


__name__ = HERE
