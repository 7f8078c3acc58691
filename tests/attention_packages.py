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


# --- flash-attn: [B, S, H, d], and packed [B * S, H, d] ---------------------------------------------------------------


def flash_attn_func(
    q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
    deterministic=False, return_attn_probs=False,
):  # fmt: skip
    """flash-attn 2's, which knows no mask."""
    q, k, v = (one.transpose(1, 2) for one in (q, k, v))
    out = TORCHS(q, k, v, is_causal=causal, scale=softmax_scale).transpose(1, 2)
    return (out, out.new_zeros(*q.shape[:3]), None) if return_attn_probs else out


def flash_attn_3_func(
    q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None,
    window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0,
    return_attn_probs=False,
):  # fmt: skip
    """flash-attn 3's."""
    return flash_attn_func(q, k, v, 0.0, softmax_scale, causal, return_attn_probs=return_attn_probs)


def flash_attn_4_func(q, k, v, softmax_scale=None, causal=False, **more):
    """flash-attn 4's, which always gives the logarithms, too."""
    return flash_attn_func(q, k, v, 0.0, softmax_scale, causal, return_attn_probs=True)[:2]


def aiter_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, return_lse=False):
    """AMD's."""
    return flash_attn_func(q, k, v, dropout_p, softmax_scale, causal, return_attn_probs=return_lse)


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), return_attn_probs=False, **more,
):  # fmt: skip
    """One sequence behind the other, of which each has a length of its own."""
    ends = zip(cu_seqlens_q[:-1], cu_seqlens_q[1:], cu_seqlens_k[:-1], cu_seqlens_k[1:], strict=True)
    return torch.cat([
        flash_attn_func(q[None, start:end], k[None, first:last], v[None, first:last], 0.0, softmax_scale, causal)[0]
        for start, end, first, last in ends
    ])  # fmt: skip


# --- SageAttention ----------------------------------------------------------------------------------------------------


def sageattn1(q, k, v, tensor_layout="HND", is_causal=False, sm_scale=None, smooth_k=True, **kwargs):
    """Version 1: whatever else it is given it swallows, masks among it."""
    q, k, v = (one.transpose(1, 2) if tensor_layout == "NHD" else one for one in (q, k, v))
    out = TORCHS(q, k, v, is_causal=is_causal, scale=sm_scale)
    return out.transpose(1, 2) if tensor_layout == "NHD" else out


def sageattn(q, k, v, tensor_layout="HND", is_causal=False, sm_scale=None, return_lse=False, **kwargs):
    """Version 2: the same, and the logarithms of its sums."""
    out = sageattn1(q, k, v, tensor_layout, is_causal, sm_scale)
    return (out, out.new_zeros(out.shape[:-1])) if return_lse else out


def sageattn3_blackwell(q, k, v, attn_mask=None, is_causal=False, per_block_mean=True, **kwargs):
    """Version 3: a mask is an argument, and is not looked at; nor is a scale."""
    return TORCHS(q, k, v, is_causal=is_causal)


def sageattn_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, is_causal=False, sm_scale=None):
    """Packed, as flash-attn's."""
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    return flash_attn_varlen_func(q, k, v, *lengths, softmax_scale=sm_scale, causal=is_causal)


# --- others -----------------------------------------------------------------------------------------------------------


def npu_fusion_attention(query, key, value, head_num, atten_mask=None, scale=1.0, **more):
    """torch_npu's, whose mask says what to leave out."""
    mask = None if atten_mask is None else ~atten_mask.bool()
    return (TORCHS(*(one.transpose(1, 2) for one in (query, key, value)), mask, scale=scale).transpose(1, 2),)


def xla_flash_attention(q, k, v, causal=False):
    """torch_xla's, which scales nothing."""
    return TORCHS(q, k, v, is_causal=causal, scale=1.0)


def put_into_diffusers(monkeypatch: Any, dispatch: ModuleType) -> None:
    """As if its dispatcher (`diffusers.models.attention_dispatch`) had found all packages, and kernels on the hub."""
    sages = dict.fromkeys(("sageattn", *(f"sageattn_qk_int8_pv_{how}" for how in (
        "fp8_cuda", "fp8_cuda_sm90", "fp16_cuda", "fp16_triton"))), sageattn)  # fmt: skip
    found = {
        **sages, "flash_attn_func": flash_attn_func, "flash_attn_varlen_func": flash_attn_varlen_func,
        "flash_attn_3_varlen_func": flash_attn_varlen_func, "sageattn_varlen": sageattn_varlen,
        "_wrapped_flash_attn_3": lambda **given: flash_attn_3_func(**given, return_attn_probs=True)[:2],
        "npu_fusion_attention": npu_fusion_attention, "xla_flash_attention": xla_flash_attention,
        "xops": SimpleNamespace(memory_efficient_attention=memory_efficient_attention),
    }  # fmt: skip
    for name, function in found.items():
        monkeypatch.setattr(dispatch, name, function, raising=False)
    kinds = {"varlen": flash_attn_varlen_func, "blackwell": sageattn3_blackwell, "sage": sageattn, "aiter": aiter_func,
             "flash_4": flash_attn_4_func, "flash_3": flash_attn_3_func, "flash": flash_attn_func}  # fmt: skip
    for name, kernel in getattr(dispatch, "_HUB_KERNELS_REGISTRY", {}).items():
        function = next(one for kind, one in kinds.items() if kind in name.value)
        monkeypatch.setattr(kernel, "kernel_fn", function)
    # of kernels that a CPU lacks
    monkeypatch.setattr(torch.nn.attention, "sdpa_kernel", lambda *_, **__: contextlib.nullcontext())
