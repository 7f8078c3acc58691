"""The transformer block that Stable Diffusion 1.5 runs at its finest level, in plain torch with LDM's names.

For measuring: its sizes and operations are the real ones, its weights are random. The names are the ones both
this package and tomesd look for, so that both patch it as they would patch a model.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

CHANNELS, HEADS, CONTEXT_CHANNELS, CONTEXT_TOKENS = 320, 8, 768, 77


class CrossAttention(nn.Module):
    """Attention from ``[B, N, C]`` to a context ``[B, M, D]``, or to itself; with a mask, as ComfyUI's takes one."""

    def __init__(self, channels: int, context_channels: int) -> None:
        super().__init__()
        self.heads = HEADS
        self.to_q = nn.Linear(channels, channels, bias=False)
        self.to_k = nn.Linear(context_channels, channels, bias=False)
        self.to_v = nn.Linear(context_channels, channels, bias=False)
        self.to_out = nn.Linear(channels, channels)

    def forward(
        self, x: torch.Tensor, context: torch.Tensor | None = None, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """``[B, N, C]`` to ``[B, N, C]``. mask: ``[B, 1 or N, M]``, added to the logits."""
        context = x if context is None else context
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in (self.to_q(x), self.to_k(context), self.to_v(context))
        )
        mask = None if mask is None else mask[:, None]
        return self.to_out(F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """GEGLU with four times the channels inside."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.inward = nn.Linear(channels, channels * 8)
        self.outward = nn.Linear(channels * 4, channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[B, N, C]`` to ``[B, N, C]``."""
        value, gate = self.inward(x).chunk(2, dim=-1)
        return self.outward(value * F.gelu(gate))


class BasicTransformerBlock(nn.Module):
    """Self-attention, cross-attention, feed-forward, each on a normed input and added to it."""

    disable_self_attn = False

    def __init__(self) -> None:
        super().__init__()
        self.attn1 = CrossAttention(CHANNELS, CHANNELS)
        self.attn2 = CrossAttention(CHANNELS, CONTEXT_CHANNELS)
        self.ff = FeedForward(CHANNELS)
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(CHANNELS) for _ in range(3))

    def forward(self, x: torch.Tensor, context: torch.Tensor | None = None) -> torch.Tensor:
        """``[B, N, C]`` to ``[B, N, C]``."""
        return self._forward(x, context=context)

    def _forward(self, x: torch.Tensor, context: torch.Tensor | None = None) -> torch.Tensor:
        x = self.attn1(self.norm1(x), context=None) + x
        x = self.attn2(self.norm2(x), context=context) + x
        return self.ff(self.norm3(x)) + x


class SpatialTransformer(nn.Module):
    """One block between picture and tokens; the projections around it are left out, merging does not touch them."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer_blocks = nn.ModuleList([BasicTransformerBlock()])

    def forward(self, x: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        """x: ``[B, 320, H, W]``; context: ``[B, 77, 768]``. Returns ``[B, 320, H, W]``."""
        tokens = x.flatten(2).transpose(1, 2).contiguous()
        return self.transformer_blocks[0](tokens, context=context).transpose(1, 2).view_as(x)


def make_block(device: str = "cpu", dtype: torch.dtype = torch.float32) -> SpatialTransformer:
    """The block with fixed random weights, ready for inference; leaves the global generator alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return SpatialTransformer().to(device, dtype).eval().requires_grad_(False)


def make_inputs(side: int, batch: int, device: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """A picture ``[batch, 320, side, side]`` and a prompt, from a fixed seed."""
    generator = torch.Generator().manual_seed(1)
    picture = torch.randn(batch, CHANNELS, side, side, generator=generator)
    prompt = torch.randn(batch, CONTEXT_TOKENS, CONTEXT_CHANNELS, generator=generator)
    return picture.to(device, dtype), prompt.to(device, dtype)
