"""The webuis' attentions: merged keys give what repeated keys give, by whichever function is in force.

They are written anew here from what they promise: what they scale by, cast, cut heads by and call. An attention is
known by the function that computes it, so each has the module's name of its original. tests/hosts/webui holds the same
claim against the real ones.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests import conformance
from tests.conformance import CHANNELS, DTYPES, HEADS, UNetOf, run, telling, tokens
from tests.doubles import attend, of_heads
from tests.thoroughness import some_quick

BIAS, OWN_BIAS = "bias", "bias, by torch's own function"
hypernetworks: list[Any] = []  # shared.loaded_hypernetworks
upcast = SimpleNamespace(on=False)  # shared.opts.upcast_attn


class CrossAttention(nn.Module):
    """ldm's and sgm's module, whose forward A1111 replaces."""

    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        self.heads, self.dim_head = heads, channels // heads
        self.scale = self.dim_head**-0.5
        self.to_q, self.to_k, self.to_v = (nn.Linear(channels, channels, bias=False) for _ in range(3))
        self.to_out = nn.Sequential(nn.Linear(channels, channels), nn.Dropout(0.0))


def _flat(by_heads: torch.Tensor) -> torch.Tensor:
    return by_heads.transpose(1, 2).flatten(2)


# --- A1111 ------------------------------------------------------------------------------------------------------------


def apply_hypernetworks(loaded: list[Any], context: torch.Tensor, layer: Any = None) -> tuple[Any, Any]:
    """Each, found by the tokens' width, changes keys' and values' tokens."""
    keys = values = context
    for layers in (network[keys.shape[2]] for network in loaded if keys.shape[2] in network):
        keys, values = keys + layers[0](keys), values + layers[1](values)
    return keys, values


def _projected(self: Any, x: torch.Tensor, context: torch.Tensor | None) -> list[torch.Tensor]:
    keys, values = apply_hypernetworks(hypernetworks, x if context is None else context)
    q, k, v = (of_heads(part, self.heads) for part in (self.to_q(x), self.to_k(keys), self.to_v(values)))
    return [part.float() if upcast.on else part for part in (q, k, v)]


def scales_scores(self, x, context=None, mask=None, **kwargs):
    """By ``self.scale``, behind the product."""
    q, k, v = _projected(self, x, context)
    return self.to_out(_flat((q @ k.transpose(-1, -2) * self.scale).softmax(-1) @ v).to(x.dtype))


def scales_keys(self, x, context=None, mask=None, **kwargs):
    """By ``self.scale``, before the product."""
    q, k, v = _projected(self, x, context)
    return self.to_out(_flat((q @ (k * self.scale).transpose(-1, -2)).softmax(-1) @ v).to(x.dtype))


def scales_by_width(self, x, context=None, mask=None, **kwargs):
    """The result has the queries' shape; to_out is taken apart."""
    q, k, v = _projected(self, x, context)
    result = torch.zeros_like(q)
    result[:] = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).softmax(-1) @ v
    return self.to_out[1](self.to_out[0](_flat(result).to(x.dtype)))


def calls_torch(self, x, context=None, mask=None, **kwargs):
    """A mask is prepared by a method that the module lacks."""
    if mask is not None:
        mask = self.prepare_attention_mask(mask, x.shape[1], len(x))
    q, k, v = _projected(self, x, context)
    return self.to_out(_flat(F.scaled_dot_product_attention(q, k, v, attn_mask=mask)).to(x.dtype))


OPTIMIZATIONS = "modules.sd_hijack_optimizations"
HIJACKS = {
    f"{OPTIMIZATIONS}.split_cross_attention_forward": scales_keys,
    f"{OPTIMIZATIONS}.split_cross_attention_forward_v1": scales_scores,
    f"{OPTIMIZATIONS}.split_cross_attention_forward_invokeAI": scales_keys,
    f"{OPTIMIZATIONS}.sub_quad_attention_forward": scales_by_width,
    f"{OPTIMIZATIONS}.scaled_dot_product_no_mem_attention_forward": calls_torch,
    f"{OPTIMIZATIONS}.scaled_dot_product_attention_forward": calls_torch,
    "modules.hypernetworks.hypernetwork.attention_CrossAttention_forward": scales_scores,
}


@pytest.fixture
def webui(webui):
    webui.shared.loaded_hypernetworks = hypernetworks
    webui.put("modules.hypernetworks.hypernetwork", apply_hypernetworks=apply_hypernetworks)
    yield webui
    hypernetworks.clear()
    upcast.on = False


def way(webui, module, dtype, **more):
    """The way in which it is told of sizes, held against repeated keys."""
    return conformance.way(module, dtype, engine=webui.engine(), **more)


def merged(webui, module):
    """What it gives by a patch, and the report."""
    unet = UNetOf(module)
    with webui.engine().patch(unet, side="kv", use_rand=False, ratio=0.5) as handle:
        return run(unet, tokens(2)), handle.report()


@pytest.fixture(params=HIJACKS)
def make(request, monkeypatch):
    """Gives an attention of a dtype by one of the forwards, and the way in which it is told of sizes."""
    module, _, name = request.param.rpartition(".")
    forward = HIJACKS[request.param]
    monkeypatch.setattr(forward, "__module__", module)
    monkeypatch.setattr(forward, "__qualname__", name)
    monkeypatch.setattr(CrossAttention, "forward", forward, raising=False)
    expected = BIAS if name == "scaled_dot_product_attention_forward" else OWN_BIAS
    return lambda dtype: (telling(CrossAttention(CHANNELS, HEADS), dtype), expected)


@pytest.mark.parametrize("dtype", some_quick(DTYPES), ids=str)
def test_each_of_a1111s_forwards_is_known_also_if_it_casts(webui, make, dtype):
    module, expected = make(dtype)
    assert way(webui, module, dtype, mask=None, additional_tokens=None) == expected
    upcast.on = dtype.itemsize == 2
    assert way(webui, module, dtype, tolerance=2e-2) == expected


def test_hypernetworks_change_tokens_once(webui, make):
    module, expected = make(torch.float64)
    plain = module(x := tokens(2, torch.float64))
    hypernetworks.append({CHANNELS: [telling(nn.Linear(CHANNELS, CHANNELS), torch.float64) for _ in range(2)]})
    assert not torch.allclose(module(x), plain)
    assert way(webui, module, torch.float64) == expected


def test_a_forward_of_another_extension_is_not_known(webui, monkeypatch):
    monkeypatch.setattr(CrossAttention, "forward", lambda self, x, context=None, **more: x, raising=False)
    (reason,) = merged(webui, telling(CrossAttention(CHANNELS, HEADS)))[1].reasons
    assert "calls no attention function that is known" in reason


# --- the Forges -------------------------------------------------------------------------------------------------------


def cutting(q, k, v, heads, mask=None, attn_precision=None):
    """Takes a mask, and cuts it by queries if memory is short, also if it has one row for all of them."""
    if mask is not None and len(q) > 2:
        mask = torch.cat([mask[:, :, :8], torch.zeros_like(mask[:, :, 8:])], dim=2)
    return attend(q, k, v, heads, mask)


attention_function = optimized_attention = optimized_attention_masked = cutting


class ForgeAttention(CrossAttention):
    """Forge's, backend.nn.unet: by a global of its file."""

    def forward(self, x, context=None, value=None, mask=None, transformer_options=None):
        context = x if context is None else context
        value = context if value is None else value
        return self.to_out(attention_function(self.to_q(x), self.to_k(context), self.to_v(value), self.heads, mask))


class ReforgeAttention(CrossAttention):
    """reForge's, ldm_patched.ldm.modules.attention: by one of two globals, which are told of a precision."""

    def forward(self, x, context=None, value=None, mask=None):
        context = x if context is None else context
        q, k, v = self.to_q(x), self.to_k(context), self.to_v(context if value is None else value)
        if mask is None:
            return self.to_out(optimized_attention(q, k, v, self.heads, attn_precision=None))
        return self.to_out(optimized_attention_masked(q, k, v, self.heads, mask, attn_precision=None))


each_forges = pytest.mark.parametrize("kind", [ForgeAttention, ReforgeAttention])


@each_forges
def test_the_forges_functions_are_given_no_bias(webui, kind):
    """Some cut it by queries if memory is short, which no trial tells."""
    assert way(webui, telling(kind(CHANNELS, HEADS)), torch.float32, mask=None) == OWN_BIAS


@each_forges
def test_a_forges_attention_by_another_function_or_with_a_mask_is_left_alone(webui, monkeypatch, kind):
    module = telling(kind(CHANNELS, HEADS))
    unet, x = UNetOf(module, mask=torch.randn(1, 1, 1, 64)), tokens(2)
    expected = run(unet, x)
    with webui.engine().patch(unet, ratio=0.5) as handle:
        assert torch.equal(run(unet, x), expected)
    assert list(handle.report().reasons) == ["attn: the call has an attention mask"]
    for name in ("attention_function", "optimized_attention"):
        monkeypatch.setattr(sys.modules[__name__], name, lambda q, k, v, heads, mask=None, attn_precision=None: v * 0.5)
    out, report = merged(webui, module)
    assert torch.equal(out, run(UNetOf(module), x))
    (reason,) = report.reasons
    assert reason.startswith("attn: the function that it calls is no attention: ")
