"""Attention functions of packages that run on GPUs alone, as strict as they are, computed by torch's own function.

Each takes or refuses what the real one does; what it swallows in silence, it swallows here.
"""

from __future__ import annotations

import contextlib
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from tests.conformance import memory_efficient_attention

TORCHS = torch.nn.functional.scaled_dot_product_attention


def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, return_attn_probs=False, return_lse=False,
                    **more):  # fmt: skip
    """flash-attn 2's and 3's and AMD's in one, ``[B, S, H, d]``, none of which knows a mask."""
    assert "attn_mask" not in more
    q, k, v = (one.transpose(1, 2) for one in (q, k, v))
    out = TORCHS(q, k, v, is_causal=causal, scale=softmax_scale).transpose(1, 2)
    return (out, out.new_zeros(*q.shape[:3])) if return_attn_probs or return_lse else out


def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale=None,
                           causal=False, **more):  # fmt: skip
    """Packed ``[B * S, H, d]``: one sequence behind the other, of which each has a length of its own."""
    ends = zip(cu_seqlens_q[:-1], cu_seqlens_q[1:], cu_seqlens_k[:-1], cu_seqlens_k[1:], strict=True)
    return torch.cat([
        flash_attn_func(q[None, start:end], k[None, first:last], v[None, first:last], 0.0, softmax_scale, causal)[0]
        for start, end, first, last in ends
    ])  # fmt: skip


def sageattn1(q, k, v, tensor_layout="HND", is_causal=False, sm_scale=None, smooth_k=True, **kwargs):
    """SageAttention 1: whatever else it is given it swallows, masks among it."""
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


def npu_fusion_attention(query, key, value, head_num, atten_mask=None, scale=1.0, **more):
    """torch_npu's, whose mask says what to leave out."""
    mask = None if atten_mask is None else ~atten_mask.bool()
    return (TORCHS(*(one.transpose(1, 2) for one in (query, key, value)), mask, scale=scale).transpose(1, 2),)


def xla_flash_attention(q, k, v, causal=False):
    """torch_xla's, which scales nothing."""
    return TORCHS(q, k, v, is_causal=causal, scale=1.0)


def put_into_diffusers(monkeypatch: Any, dispatch: ModuleType) -> None:
    """As if its dispatcher (`diffusers.models.attention_dispatch`) had found all packages, and kernels on the hub."""
    with_logarithms = partial(flash_attn_func, return_lse=True)
    sages = dict.fromkeys(("sageattn", *(f"sageattn_qk_int8_pv_{how}" for how in (
        "fp8_cuda", "fp8_cuda_sm90", "fp16_cuda", "fp16_triton"))), sageattn)  # fmt: skip
    functions = {
        **sages, "flash_attn_func": flash_attn_func, "flash_attn_varlen_func": flash_attn_varlen_func,
        "flash_attn_3_varlen_func": flash_attn_varlen_func, "sageattn_varlen": sageattn_varlen,
        "_wrapped_flash_attn_3": with_logarithms, "npu_fusion_attention": npu_fusion_attention,
        "xla_flash_attention": xla_flash_attention,
        "xops": SimpleNamespace(memory_efficient_attention=memory_efficient_attention),
    }  # fmt: skip
    for name, function in functions.items():
        monkeypatch.setattr(dispatch, name, function, raising=False)
    # flash-attn 4 always gives the logarithms, too
    kinds = {"varlen": flash_attn_varlen_func, "blackwell": sageattn3_blackwell, "sage": sageattn,
             "flash_4": with_logarithms, "": flash_attn_func}  # fmt: skip
    for name, kernel in getattr(dispatch, "_HUB_KERNELS_REGISTRY", {}).items():
        monkeypatch.setattr(kernel, "kernel_fn", next(kinds[kind] for kind in kinds if kind in name.value))
    # of kernels that a CPU lacks
    monkeypatch.setattr(torch.nn.attention, "sdpa_kernel", lambda *_, **__: contextlib.nullcontext())
