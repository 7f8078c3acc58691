"""Attention functions of packages that run on GPUs alone, by their real signatures, computed by torch's own function.

Each takes or refuses what the real one does; what it swallows in silence, it swallows here.
"""

from __future__ import annotations

import contextlib
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from tests.conformance import memory_efficient_attention

TORCHS = torch.nn.functional.scaled_dot_product_attention


def flash_attn_func(
    q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
    deterministic=False, return_attn_probs=False,
):  # fmt: skip
    """flash-attn 2's, ``[B, S, H, d]``, which knows no mask."""
    q, k, v = (one.transpose(1, 2) for one in (q, k, v))
    out = TORCHS(q, k, v, is_causal=causal, scale=softmax_scale).transpose(1, 2)
    return (out, out.new_zeros(*q.shape[:3]), None) if return_attn_probs else out


def sageattn(q, k, v, tensor_layout="HND", is_causal=False, sm_scale=None, return_lse=False, **kwargs):
    """SageAttention 2's: whatever else it is given it swallows, masks among it."""
    q, k, v = (one.transpose(1, 2) if tensor_layout == "NHD" else one for one in (q, k, v))
    out = TORCHS(q, k, v, is_causal=is_causal, scale=sm_scale)
    out = out.transpose(1, 2) if tensor_layout == "NHD" else out
    return (out, out.new_zeros(out.shape[:-1])) if return_lse else out


def put_into_diffusers(monkeypatch: Any, dispatch: ModuleType) -> None:
    """As if its dispatcher (`diffusers.models.attention_dispatch`) had found these packages."""
    monkeypatch.setattr(dispatch, "flash_attn_func", flash_attn_func, raising=False)
    monkeypatch.setattr(dispatch, "sageattn", sageattn, raising=False)
    xops = SimpleNamespace(memory_efficient_attention=memory_efficient_attention)
    monkeypatch.setattr(dispatch, "xops", xops, raising=False)
    # of kernels that a CPU lacks
    monkeypatch.setattr(torch.nn.attention, "sdpa_kernel", lambda *_, **__: contextlib.nullcontext())
