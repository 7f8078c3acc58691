"""The webuis' attentions, as doubles with their names: merged keys give what repeated keys give."""

import sys

import pytest
import torch
import torch.nn.functional as F
from ldm.modules.attention import CrossAttention
from torch import nn

from tests.engine.attention import conformance
from tests.engine.attention.conformance import CHANNELS, DTYPES, HEADS, UNetOf, run, telling, tokens
from tests.host_doubles.blocks import attend, of_heads
from tests.thoroughness import some_quick

BIAS, OWN_BIAS = "bias", "bias, by torch's own function"
loaded_hypernetworks = []


def make(kind=CrossAttention, dtype=torch.float32):
    return telling(kind(CHANNELS, heads=HEADS, dim_head=CHANNELS // HEADS), dtype)


def left_alone(webui, module, **kwargs):
    unet, x = UNetOf(module, **kwargs), tokens(2)
    expected = run(unet, x)
    with webui.engine().patch(unet, side="kv", use_rand=False, ratio=0.5) as handle:
        assert torch.equal(run(unet, x), expected)
    (reason,) = handle.report().reasons
    return reason


def apply_hypernetworks(loaded, context, layer=None):
    """Each hypernetwork changes the tokens of keys and values if it knows their width."""
    keys = values = context
    for layers in (network[keys.shape[2]] for network in loaded if keys.shape[2] in network):
        keys, values = keys + layers[0](keys), values + layers[1](values)
    return keys, values


def projected(self, x, context):
    """Queries, keys and values by heads; bfloat16 stands for a webui that upcasts here."""
    keys, values = apply_hypernetworks(loaded_hypernetworks, x if context is None else context)
    parts = [of_heads(part, self.heads) for part in (self.to_q(x), self.to_k(keys), self.to_v(values))]
    return [part.float() for part in parts] if x.dtype is torch.bfloat16 else parts


def joined(by_heads, x):
    return by_heads.transpose(1, 2).flatten(2).to(x.dtype)


def scales_by_attribute(self, x, context=None, mask=None, **kwargs):
    q, k, v = projected(self, x, context)
    return self.to_out(joined((q @ (k * self.scale).transpose(-1, -2)).softmax(-1) @ v, x))


def scales_by_width(self, x, context=None, mask=None, **kwargs):
    """A forward whose result has the queries' shape, and which calls the parts of to_out."""
    q, k, v = projected(self, x, context)
    result = torch.zeros_like(q)
    result[:] = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).softmax(-1) @ v
    return self.to_out[1](self.to_out[0](joined(result, x)))


def calls_torch(self, x, context=None, mask=None, **kwargs):
    q, k, v = projected(self, x, context)
    return self.to_out(joined(F.scaled_dot_product_attention(q, k, v), x))


FORWARDS = {
    "modules.sd_hijack_optimizations.split_cross_attention_forward": (scales_by_attribute, OWN_BIAS),
    "modules.sd_hijack_optimizations.split_cross_attention_forward_v1": (scales_by_attribute, OWN_BIAS),
    "modules.sd_hijack_optimizations.split_cross_attention_forward_invokeAI": (scales_by_attribute, OWN_BIAS),
    "modules.sd_hijack_optimizations.sub_quad_attention_forward": (scales_by_width, OWN_BIAS),
    "modules.sd_hijack_optimizations.scaled_dot_product_no_mem_attention_forward": (calls_torch, OWN_BIAS),
    "modules.sd_hijack_optimizations.scaled_dot_product_attention_forward": (calls_torch, BIAS),
    "modules.hypernetworks.hypernetwork.attention_CrossAttention_forward": (scales_by_attribute, OWN_BIAS),
}


@pytest.fixture(params=FORWARDS)
def expected(request, monkeypatch):
    """Put one of the forwards in place, and return the way in which it gets the sizes."""
    forward, expected = FORWARDS[request.param]
    for attribute, value in zip(("__module__", "__qualname__"), request.param.rsplit(".", 1), strict=True):
        monkeypatch.setattr(forward, attribute, value)
    monkeypatch.setattr(CrossAttention, "forward", forward)
    return expected


@pytest.mark.parametrize("dtype", some_quick(DTYPES), ids=str)
def test_each_of_a1111s_forwards_is_known(webui, expected, dtype):
    kwargs = {"mask": None, "additional_tokens": None}
    assert conformance.way(make(dtype=dtype), dtype, engine=webui.engine(), **kwargs) == expected


def test_hypernetworks_change_tokens_once(webui, expected, monkeypatch):
    module, x = make(dtype=torch.float64), tokens(2, torch.float64)
    plain = module(x)
    layers = [telling(nn.Linear(CHANNELS, CHANNELS), torch.float64) for _ in range(2)]
    monkeypatch.setattr(sys.modules[__name__], "loaded_hypernetworks", [{CHANNELS: layers}])
    webui.shared.loaded_hypernetworks = loaded_hypernetworks
    webui.put("modules.hypernetworks.hypernetwork", apply_hypernetworks=apply_hypernetworks)
    assert not torch.allclose(module(x), plain)
    assert conformance.way(module, torch.float64, engine=webui.engine()) == expected


def cutting(q, k, v, heads, mask=None, attn_precision=None):
    """Attend with a mask, cut by queries if memory is short, even if the mask has one row for all queries."""
    if mask is not None and len(q) > 2:
        mask = torch.cat([mask[:, :, :8], torch.zeros_like(mask[:, :, 8:])], dim=2)
    return attend(q, k, v, heads, mask)


attention_function = optimized_attention = optimized_attention_masked = cutting


class ForgeAttention(CrossAttention):
    def forward(self, x, context=None, value=None, mask=None, transformer_options=None):
        context = x if context is None else context
        value = context if value is None else value
        return self.to_out(attention_function(self.to_q(x), self.to_k(context), self.to_v(value), self.heads, mask))


class ReforgeAttention(CrossAttention):
    """reForge's attention, which calls one of two globals, with a precision."""

    def forward(self, x, context=None, value=None, mask=None):
        context = x if context is None else context
        q, k, v = self.to_q(x), self.to_k(context), self.to_v(context if value is None else value)
        if mask is None:
            return self.to_out(optimized_attention(q, k, v, self.heads, attn_precision=None))
        return self.to_out(optimized_attention_masked(q, k, v, self.heads, mask, attn_precision=None))


@pytest.mark.parametrize("kind", [ForgeAttention, ReforgeAttention])
def test_the_forges_functions_are_given_no_bias_and_what_is_no_attention_or_masked_is_left_alone(webui, monkeypatch,
                                                                                                 kind):  # fmt: skip
    """Some functions cut a bias by queries if memory is short, which no trial shows."""
    assert conformance.way(make(kind), torch.float32, engine=webui.engine(), mask=None) == OWN_BIAS
    assert left_alone(webui, make(kind), mask=torch.randn(1, 1, 1, 64)) == "attn: an attention mask is on"
    for name in ("attention_function", "optimized_attention"):
        monkeypatch.setattr(sys.modules[__name__], name, lambda q, k, v, heads, mask=None, attn_precision=None: v * 0.5)
    assert left_alone(webui, make(kind)).startswith("attn: the function that it calls is no attention: ")
