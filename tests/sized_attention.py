"""What tests of proportional attention share: the formula in float64, and what each merged self-attention was asked."""

from __future__ import annotations

import copy
from typing import NamedTuple

import pytest
import torch
from torch import nn

from tome_core import MergeConfig, MergePlan

sides = pytest.mark.parametrize("side", ["qkv", "kv"])


def everywhere(side: str, **more) -> MergeConfig:
    """Without a correction, which is held by itself in test_correction.py."""
    return MergeConfig(side=side, max_downsample=8, use_rand=False, correction=False, **more)


def masked_formula(attention: nn.Module, x, keys, sizes) -> torch.Tensor:
    """``to_out(softmax(q k / sqrt(d) + log n) v)`` in float64; sizes: ``[B or 1, G]``."""
    exact = copy.deepcopy(attention).double()
    q, k, v = (
        layer(tokens.double()).unflatten(-1, (exact.heads, -1)).transpose(1, 2)
        for layer, tokens in ((exact.to_q, x), (exact.to_k, keys), (exact.to_v, keys))
    )
    logits = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5 + sizes.double().log()[:, None, None]
    out = (logits.softmax(-1) @ v).transpose(1, 2).flatten(2)
    for layer in exact.to_out if isinstance(exact.to_out, nn.ModuleList) else [exact.to_out]:
        out = layer(out)
    return out


class MergedAttention(NamedTuple):
    """One merged self-attention. plan: that merged its keys, None where their sizes do not count; way: it took."""

    attention: nn.Module
    plan: MergePlan | None
    way: str
    x: torch.Tensor
    keys: torch.Tensor
    out: torch.Tensor
