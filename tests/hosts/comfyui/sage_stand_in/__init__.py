"""Loaded into ComfyUI as a pack: stands in for the package sageattention, which runs on GPUs alone.

torch's attention by its signature. The real one takes no mask; neither does this one, and says so as loudly.
"""

import sys
import types

import torch


def sageattn(q, k, v, is_causal=False, attn_mask=None, tensor_layout="HND"):
    assert attn_mask is None, "SageAttention takes no mask"
    if tensor_layout == "NHD":
        q, k, v = (one.transpose(1, 2) for one in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
    return out.transpose(1, 2) if tensor_layout == "NHD" else out


sys.modules["sageattention"] = types.SimpleNamespace(sageattn=sageattn)
NODE_CLASS_MAPPINGS = {}
