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


# --- what all of them have in common ---------------------------------------------------------------------------------


class CrossAttention(nn.Module):
    """ldm's and sgm's module; its forward is what a test puts there."""

    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        self.heads, self.dim_head = heads, channels // heads
        self.scale = self.dim_head**-0.5
        self.to_q, self.to_k, self.to_v = (nn.Linear(channels, channels, bias=False) for _ in range(3))
        self.to_out = nn.Sequential(nn.Linear(channels, channels), nn.Dropout(0.0))


def _flat(of_heads: torch.Tensor) -> torch.Tensor:
    return of_heads.transpose(1, 2).flatten(2)


# --- A1111 -----------------------------------------------------------------------------------------------------------


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


__name__ = "modules.sd_hijack_optimizations"


def _projected(self: Any, x: torch.Tensor, context: torch.Tensor | None) -> list[torch.Tensor]:
    keys, values = apply_hypernetworks(hypernetworks, x if context is None else context)
    q, k, v = (of_heads(one, self.heads) for one in (self.to_q(x), self.to_k(keys), self.to_v(values)))
    return [one.float() if upcast.on else one for one in (q, k, v)]


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
    _by_scale("attention_CrossAttention_forward", "modules.hypernetworks.hypernetwork"),
    _by_scale("split_cross_attention_forward", keys_first=True), _by_scale("split_cross_attention_forward_v1"),
    _by_scale("split_cross_attention_forward_invokeAI", keys_first=True), sub_quad_attention_forward,
    xformers_attention_forward, scaled_dot_product_attention_forward, scaled_dot_product_no_mem_attention_forward,
)}  # fmt: skip
xformers: Any = None  # a test puts one here


# --- the Forges ------------------------------------------------------------------------------------------------------

__name__ = HERE
_REFORGE = "ldm_patched.ldm.modules.attention"


def _by_products(q: Any, k: Any, v: Any, heads: int, mask: Any = None, rows: int = 0) -> torch.Tensor:
    """rows: queries at once, by which a mask is cut."""
    q, k, v = (of_heads(one, heads) for one in (q, k, v))
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if mask is not None:
        for start in range(0, q.shape[2], rows):
            scores[:, :, start : start + rows] += mask[:, :, start : start + rows]
    return _flat(scores.softmax(-1) @ v)


def _adding(rows: int = 2**20) -> Any:
    """A function that adds a mask, and has the arguments of newer ones."""

    def function(q, k, v, heads, mask=None, attn_precision=None, skip_reshape=False, skip_output_reshape=False):
        return _by_products(q, k, v, heads, mask, rows)

    return function


def _refusing() -> Any:
    """One for which a mask of four dimensions is none."""

    def function(q, k, v, heads, mask=None, attn_precision=None):
        assert mask is None
        return _by_products(q, k, v, heads)

    return function


def _by_torch(widths: tuple[int, ...] = ()) -> Any:
    """One that adds any mask, for heads of these widths alone."""

    def function(q, k, v, heads, mask=None, attn_precision=None):
        assert not widths or q.shape[-1] // heads in widths, f"headdim should be in {widths}."
        return attend(q, k, v, heads, mask)

    return function


def _called(module: str, **functions: Any) -> dict[str, Any]:
    for name, one in functions.items():
        one.__module__, one.__name__, one.__qualname__ = module, name, name
    return functions


FORGE = _called("backend.attention", attention_basic=_adding(), attention_split=_adding(rows=8),
                attention_sub_quad=_refusing(), attention_pytorch=_by_torch())  # fmt: skip
REFORGE = _called(_REFORGE, attention_basic=_adding(), attention_split=_adding(), attention_sub_quad=_refusing(),
                  attention_pytorch=_by_torch())  # fmt: skip
# Forge Classic's, of reForge's names: a mask for heads within the batch, or torch's function that takes any
CLASSIC = _called(_REFORGE, attention_basic=_refusing(), attention_split=_refusing(), attention_xformers=_refusing(),
                  attention_pytorch=_by_torch(), attention_sage=_by_torch(widths=(64, 96, 128)))  # fmt: skip
attention_function = FORGE["attention_pytorch"]
optimized_attention = optimized_attention_masked = REFORGE["attention_pytorch"]


def _attention_of(module: str, attend: Any) -> type[CrossAttention]:
    """A Forge's module, by the name of its file. attend: what it makes of q, k, v, its heads and a mask."""

    def forward(self, x, context=None, value=None, mask=None):
        context = x if context is None else context
        q, k, v = self.to_q(x), self.to_k(context), self.to_v(context if value is None else value)
        return self.to_out(attend(q, k, v, self.heads, mask))

    forward.__module__, forward.__qualname__ = module, "CrossAttention.forward"
    return type("CrossAttention", (CrossAttention,), {"forward": forward})


def _by_two_names(q: Any, k: Any, v: Any, heads: int, mask: Any, **more: Any) -> torch.Tensor:
    if mask is None:
        return optimized_attention(q, k, v, heads, **more)
    return optimized_attention_masked(q, k, v, heads, mask, **more)


ForgeAttention = _attention_of("backend.nn.unet", lambda *given: attention_function(*given))
ReforgeAttention = _attention_of(_REFORGE, lambda *given: _by_two_names(*given, attn_precision=None))
ClassicAttention = _attention_of(_REFORGE, _by_two_names)  # reForge's name, and functions without precision
