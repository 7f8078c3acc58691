"""The webuis' attentions, written anew from what they promise: what they scale by, cast, cut heads by and call.

Each goes by the name of its module, as an attention is known by the function that computes it; tests/hosts/webui holds
the same claims against the real ones.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.doubles import attend, of_heads

HERE = __name__
hypernetworks: list[Any] = []  # shared.loaded_hypernetworks
upcast = SimpleNamespace(on=False)  # shared.opts.upcast_attn
xformers: Any = None  # a test puts one here


class CrossAttention(nn.Module):
    """ldm's and sgm's module; its forward is what a test puts there."""

    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        self.heads, self.dim_head = heads, channels // heads
        self.scale = self.dim_head**-0.5
        self.to_q, self.to_k, self.to_v = (nn.Linear(channels, channels, bias=False) for _ in range(3))
        self.to_out = nn.Sequential(nn.Linear(channels, channels), nn.Dropout(0.0))


def _flat(by_heads: torch.Tensor) -> torch.Tensor:
    return by_heads.transpose(1, 2).flatten(2)


# --- A1111 -----------------------------------------------------------------------------------------------------------


class Hypernetwork:
    """Changes keys' and values' tokens of one width."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.layers = {width: [nn.Linear(width, width).to(dtype).requires_grad_(False) for _ in range(2)]}


def apply_hypernetworks(loaded: list[Hypernetwork], context: torch.Tensor, layer: Any = None) -> tuple[Any, Any]:
    """Each in turn, found by the tokens' width."""
    keys = values = context
    for network in loaded:
        layers = network.layers.get(keys.shape[2])
        if layers is not None:
            keys, values = keys + layers[0](keys), values + layers[1](values)
    return keys, values


__name__ = "modules.sd_hijack_optimizations"


def _projected(self: Any, x: torch.Tensor, context: torch.Tensor | None) -> list[torch.Tensor]:
    keys, values = apply_hypernetworks(hypernetworks, x if context is None else context)
    q, k, v = (of_heads(part, self.heads) for part in (self.to_q(x), self.to_k(keys), self.to_v(values)))
    return [part.float() if upcast.on else part for part in (q, k, v)]


def _by_scale(name: str, module: str = __name__, keys_first: bool = False) -> Any:
    """A forward that scales by ``self.scale``: the scores, or keys before the product."""

    def forward(self, x, context=None, mask=None, **kwargs):
        q, k, v = _projected(self, x, context)
        scores = q @ (k * self.scale).transpose(-1, -2) if keys_first else q @ k.transpose(-1, -2) * self.scale
        return self.to_out(_flat(scores.softmax(-1) @ v).to(x.dtype))

    forward.__name__ = forward.__qualname__ = name
    forward.__module__ = module
    return forward


def sub_quad_attention_forward(self, x, context=None, mask=None, **kwargs):
    """Scaled by the heads' width; the result has the queries' shape; to_out is taken apart."""
    assert mask is None
    q, k, v = _projected(self, x, context)
    result = torch.zeros_like(q)
    result[:] = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).softmax(-1) @ v
    projection, dropout = self.to_out
    return dropout(projection(_flat(result).to(x.dtype)))


def xformers_attention_forward(self, x, context=None, mask=None, **kwargs):
    """By xformers, which scales by the heads' width."""
    q, k, v = (part.transpose(1, 2) for part in _projected(self, x, context))
    out = xformers.ops.memory_efficient_attention(q, k, v, attn_bias=None, op=None)
    return self.to_out(out.flatten(2).to(x.dtype))


def scaled_dot_product_attention_forward(self, x, context=None, mask=None, **kwargs):
    """By torch's function; heads are cut by the width of x; a mask is prepared by a method that the module lacks."""
    batch, length, width = x.shape
    if mask is not None:
        mask = self.prepare_attention_mask(mask, length, batch)
        mask = mask.view(batch, self.heads, -1, mask.shape[-1])
    q, k, v = _projected(self, x, context)
    assert q.shape[-1] == width // self.heads
    out = _flat(F.scaled_dot_product_attention(q, k, v, attn_mask=mask)).to(x.dtype)
    return self.to_out[1](self.to_out[0](out))


def scaled_dot_product_no_mem_attention_forward(self, x, context=None, mask=None, **kwargs):
    """The same without the kernels that take a mask."""
    assert mask is None
    return scaled_dot_product_attention_forward(self, x, context)


HIJACKS = {forward.__name__: forward for forward in (
    _by_scale("attention_CrossAttention_forward", "modules.hypernetworks.hypernetwork"),
    _by_scale("split_cross_attention_forward", keys_first=True), _by_scale("split_cross_attention_forward_v1"),
    _by_scale("split_cross_attention_forward_invokeAI", keys_first=True), sub_quad_attention_forward,
    xformers_attention_forward, scaled_dot_product_attention_forward, scaled_dot_product_no_mem_attention_forward,
)}  # fmt: skip


# --- the Forges ------------------------------------------------------------------------------------------------------

__name__ = HERE


def _by_products(q: Any, k: Any, v: Any, heads: int, mask: Any = None, rows: int = 2**20) -> torch.Tensor:
    """rows: queries at once, by which a mask is cut."""
    q, k, v = (of_heads(part, heads) for part in (q, k, v))
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if mask is not None:
        for start in range(0, q.shape[2], rows):
            scores[:, :, start : start + rows] += mask[:, :, start : start + rows]
    return _flat(scores.softmax(-1) @ v)


def _adding(q, k, v, heads, mask=None, attn_precision=None, skip_reshape=False, skip_output_reshape=False):
    return _by_products(q, k, v, heads, mask)


def _cutting(q, k, v, heads, mask=None, attn_precision=None, skip_reshape=False):
    is_short_of_memory = len(q) > 2
    return _by_products(q, k, v, heads, mask, 8 if is_short_of_memory else 2**20)


def _refusing(q, k, v, heads, mask=None, attn_precision=None):
    assert mask is None
    return _by_products(q, k, v, heads)


def _by_torch(q, k, v, heads, mask=None, attn_precision=None):
    return attend(q, k, v, heads, mask)


# what each of theirs is one of: basic and most others add a mask; split and sub-quadratic cut one by queries if memory
# is short, also if it has one row for all of them; xformers' and Classic's take none of four dimensions
FUNCTIONS = {"adds a mask": _adding, "cuts it": _cutting, "refuses it": _refusing, "torch's": _by_torch}
attention_function = optimized_attention = optimized_attention_masked = _by_torch


class _OfForges(CrossAttention):
    def _projected(self, x: Any, context: Any, value: Any) -> tuple[torch.Tensor, ...]:
        context = x if context is None else context
        return self.to_q(x), self.to_k(context), self.to_v(context if value is None else value)


class ForgeAttention(_OfForges):
    """Forge's, backend.nn.unet: by a global of its file."""

    def forward(self, x, context=None, value=None, mask=None, transformer_options=None):
        return self.to_out(attention_function(*self._projected(x, context, value), self.heads, mask))


class ReforgeAttention(_OfForges):
    """reForge's, ldm_patched.ldm.modules.attention: by one of two globals, which are told of a precision."""

    def forward(self, x, context=None, value=None, mask=None):
        q, k, v = self._projected(x, context, value)
        if mask is None:
            return self.to_out(optimized_attention(q, k, v, self.heads, attn_precision=None))
        return self.to_out(optimized_attention_masked(q, k, v, self.heads, mask, attn_precision=None))


class ClassicAttention(_OfForges):
    """Forge Classic's, of reForge's name: the same without a precision."""

    def forward(self, x, context=None, value=None, mask=None):
        q, k, v = self._projected(x, context, value)
        if mask is None:
            return self.to_out(optimized_attention(q, k, v, self.heads))
        return self.to_out(optimized_attention_masked(q, k, v, self.heads, mask))
