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

HERE = __name__
hypernetworks: list[Any] = []  # shared.loaded_hypernetworks
upcast = SimpleNamespace(on=False)  # shared.opts.upcast_attn


# --- what all of them have in common ---------------------------------------------------------------------------------


class CrossAttention(nn.Module):
    """ldm's and sgm's module; its forward is what a test puts there."""

    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        self.heads, self.scale = heads, (channels // heads) ** -0.5
        self.to_q, self.to_k, self.to_v = (nn.Linear(channels, channels, bias=False) for _ in range(3))
        self.to_out = nn.Sequential(nn.Linear(channels, channels), nn.Dropout(0.0))


def _of_heads(flat: torch.Tensor, heads: int) -> torch.Tensor:
    return flat.unflatten(-1, (heads, -1)).transpose(1, 2)


def _flat(of_heads: torch.Tensor) -> torch.Tensor:
    return of_heads.transpose(1, 2).flatten(2)


# --- A1111 -----------------------------------------------------------------------------------------------------------

__name__ = "modules.hypernetworks.hypernetwork"


class Hypernetwork:
    """Changes keys' and values' tokens of one width."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.layers = {width: [nn.Linear(width, width).to(dtype).requires_grad_(False) for _ in range(2)]}


def apply_hypernetworks(loaded: list[Hypernetwork], context: torch.Tensor, layer: Any = None) -> tuple[Any, Any]:
    """One after another, each found by the tokens' width."""
    keys = values = context
    for one in loaded:
        found = one.layers.get(keys.shape[2])
        if found is not None:
            keys, values = keys + found[0](keys), values + found[1](values)
    return keys, values


def attention_CrossAttention_forward(self, x, context=None, mask=None, **kwargs):
    """No optimization."""
    q, k, v = _projected(self, x, context)
    return self.to_out(_flat((q @ k.transpose(-1, -2) * self.scale).softmax(-1) @ v))


__name__ = "modules.sd_hijack_optimizations"


def _projected(self: Any, x: torch.Tensor, context: torch.Tensor | None) -> list[torch.Tensor]:
    keys, values = apply_hypernetworks(hypernetworks, x if context is None else context)
    q, k, v = (_of_heads(one, self.heads) for one in (self.to_q(x), self.to_k(keys), self.to_v(values)))
    return [one.float() if upcast.on else one for one in (q, k, v)]


def split_cross_attention_forward(self, x, context=None, mask=None, **kwargs):
    """Keys are scaled before the product."""
    q, k, v = _projected(self, x, context)
    k = k * self.scale
    return self.to_out(_flat((q @ k.transpose(-1, -2)).softmax(-1) @ v).to(x.dtype))


def split_cross_attention_forward_v1(self, x, context=None, mask=None, **kwargs):
    """Scores are scaled."""
    q, k, v = _projected(self, x, context)
    return self.to_out(_flat((q @ k.transpose(-1, -2) * self.scale).softmax(-1) @ v).to(x.dtype))


def split_cross_attention_forward_invokeAI(self, x, context=None, mask=None, **kwargs):
    """Like the first."""
    return split_cross_attention_forward(self, x, context, mask)


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
    q, k, v = (one.transpose(1, 2) for one in _projected(self, x, context))
    out = xformers.ops.memory_efficient_attention(q, k, v, attn_bias=None, op=None)
    return self.to_out(out.flatten(2).to(x.dtype))


def scaled_dot_product_attention_forward(self, x, context=None, mask=None, **kwargs):
    """By torch's function; heads are cut by the width of x; a mask is prepared by a method nobody has."""
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


HIJACKS = {one.__name__: one for one in (
    attention_CrossAttention_forward, split_cross_attention_forward, split_cross_attention_forward_v1,
    split_cross_attention_forward_invokeAI, sub_quad_attention_forward, xformers_attention_forward,
    scaled_dot_product_attention_forward, scaled_dot_product_no_mem_attention_forward,
)}  # fmt: skip
xformers: Any = None  # a test puts one here


# --- the Forges ------------------------------------------------------------------------------------------------------


def _by_products(q: Any, k: Any, v: Any, heads: int, mask: Any, rows: int) -> torch.Tensor:
    """rows: queries at once, by which a mask is cut."""
    q, k, v = (_of_heads(one, heads) for one in (q, k, v))
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if mask is not None:
        for start in range(0, q.shape[2], rows):
            scores[:, :, start : start + rows] += mask[:, :, start : start + rows]
    return _flat(scores.softmax(-1) @ v)


def _made(module: str) -> dict[str, Any]:
    """The functions of a Forge, by name, of a module called so."""

    def attention_basic(q, k, v, heads, mask=None, attn_precision=None, skip_reshape=False, skip_output_reshape=False):
        return _by_products(q, k, v, heads, mask, q.shape[1])

    def attention_split(q, k, v, heads, mask=None, attn_precision=None, skip_reshape=False, skip_output_reshape=False):
        return _by_products(q, k, v, heads, mask, q.shape[1] if module.startswith("ldm_patched") else 8)

    def attention_sub_quad(q, k, v, heads, mask=None, attn_precision=None):
        assert mask is None
        return _by_products(q, k, v, heads, None, q.shape[1])

    def attention_pytorch(q, k, v, heads, mask=None, attn_precision=None):
        q, k, v = (_of_heads(one, heads) for one in (q, k, v))
        return _flat(F.scaled_dot_product_attention(q, k, v, attn_mask=mask))

    return _called(module, attention_basic, attention_split, attention_sub_quad, attention_pytorch)


def _made_for_classic() -> dict[str, Any]:
    """Forge Classic's, of reForge's names: heads lie within the batch, and a mask is added as it comes."""

    def attention_basic(q, k, v, heads, mask=None):
        q, k, v = (_of_heads(one, heads).flatten(0, 1) for one in (q, k, v))
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        if mask is not None:
            scores += mask
        return _flat((scores.softmax(-1) @ v).unflatten(0, (-1, heads)))

    def attention_split(q, k, v, heads, mask=None):
        return attention_basic(q, k, v, heads, None if mask is None else mask[:, : q.shape[1]])

    def attention_xformers(q, k, v, heads, mask=None):
        q, k, v = (_of_heads(one, heads).flatten(0, 1) for one in (q, k, v))
        if mask is not None:
            room = torch.empty(q.shape[0], q.shape[1], q.shape[1] + 8, dtype=q.dtype)
            room[:, :, : mask.shape[-1]] = mask
            mask = room[:, :, : mask.shape[-1]]
        return _flat(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).unflatten(0, (-1, heads)))

    def attention_pytorch(q, k, v, heads, mask=None):
        q, k, v = (_of_heads(one, heads) for one in (q, k, v))
        return _flat(F.scaled_dot_product_attention(q, k, v, attn_mask=mask))

    def attention_sage(q, k, v, heads, mask=None):
        assert q.shape[-1] // heads in (64, 96, 128), "headdim should be in [64, 96, 128]."
        return attention_pytorch(q, k, v, heads)

    functions = (attention_basic, attention_split, attention_xformers, attention_pytorch, attention_sage)
    return _called("ldm_patched.ldm.modules.attention", *functions)


def _called(module: str, *functions: Any) -> dict[str, Any]:
    for one in functions:
        one.__module__, one.__qualname__ = module, one.__name__
    return {one.__name__: one for one in functions}


FORGE, REFORGE = _made("backend.attention"), _made("ldm_patched.ldm.modules.attention")
CLASSIC = _made_for_classic()
attention_function = FORGE["attention_pytorch"]
optimized_attention = optimized_attention_masked = REFORGE["attention_pytorch"]
__name__ = "backend.nn.unet"


class ForgeAttention(CrossAttention):
    """Forge's, which takes its function by one name."""

    def forward(self, x, context=None, value=None, mask=None, transformer_options={}):  # noqa: B006
        """Options are handed in and not used."""
        context = x if context is None else context
        q, k, v = self.to_q(x), self.to_k(context), self.to_v(context if value is None else value)
        return self.to_out(attention_function(q, k, v, self.heads, mask))


__name__ = "ldm_patched.ldm.modules.attention"


class ReforgeAttention(CrossAttention):
    """reForge's, which takes it by two."""

    def forward(self, x, context=None, value=None, mask=None):
        """Without options."""
        context = x if context is None else context
        q, k, v = self.to_q(x), self.to_k(context), self.to_v(context if value is None else value)
        if mask is None:
            return self.to_out(optimized_attention(q, k, v, self.heads, attn_precision=None))
        return self.to_out(optimized_attention_masked(q, k, v, self.heads, mask, attn_precision=None))


class ClassicAttention(CrossAttention):
    """Forge Classic's, which has reForge's name and functions without precision."""

    def __init__(self, channels: int, heads: int) -> None:
        super().__init__(channels, heads)
        self.dim_head = channels // heads

    def forward(self, x, context=None, value=None, mask=None, transformer_options=None):
        """Options are handed in and not used."""
        context = x if context is None else context
        q, k, v = self.to_q(x), self.to_k(context), self.to_v(context if value is None else value)
        if mask is None:
            return self.to_out(optimized_attention(q, k, v, self.heads))
        return self.to_out(optimized_attention_masked(q, k, v, self.heads, mask))


for _one in (ForgeAttention, ReforgeAttention, ClassicAttention):
    _one.forward.__qualname__ = "CrossAttention.forward"
__name__ = HERE
