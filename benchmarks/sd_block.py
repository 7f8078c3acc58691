"""The transformer block that Stable Diffusion 1.5 runs at its finest level, in plain torch with LDM's names.

Its sizes and operations are the real ones, its weights are random; by its names the engine and tomesd patch it as
they would a model. Other widths, and UNets of several stages, serve to measure what does not depend on sizes.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CHANNELS, HEADS, CONTEXT_CHANNELS, CONTEXT_TOKENS = 320, 8, 768, 77


class CrossAttention(nn.Module):
    """Attention from ``[B, N, C]`` to a context ``[B, M, D]``, or to itself; mask ``[B, 1 or N, M]``, as ComfyUI's."""

    def __init__(self, channels: int, context_channels: int, heads: int = HEADS) -> None:
        super().__init__()
        self.heads = heads
        self.to_q = nn.Linear(channels, channels, bias=False)
        self.to_k = nn.Linear(context_channels, channels, bias=False)
        self.to_v = nn.Linear(context_channels, channels, bias=False)
        self.to_out = nn.Linear(channels, channels)

    def forward(self, x: Tensor, context: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        context = x if context is None else context
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
                   for part in (self.to_q(x), self.to_k(context), self.to_v(context)))  # fmt: skip
        mask = None if mask is None else mask[:, None]
        return self.to_out(F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """GEGLU with four times the channels inside."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.inward = nn.Linear(channels, channels * 8)
        self.outward = nn.Linear(channels * 4, channels)

    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.inward(x).chunk(2, dim=-1)
        return self.outward(value * F.gelu(gate))


class BasicTransformerBlock(nn.Module):
    """Self-attention, cross-attention, feed-forward, each on a normed input and added to it."""

    disable_self_attn = False

    def __init__(
        self, channels: int = CHANNELS, heads: int = HEADS, context_channels: int = CONTEXT_CHANNELS
    ) -> None:
        super().__init__()
        self.attn1 = CrossAttention(channels, channels, heads)
        self.attn2 = CrossAttention(channels, context_channels, heads)
        self.ff = FeedForward(channels)
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(channels) for _ in range(3))

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        return self._forward(x, context=context)

    def _forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        x = self.attn1(self.norm1(x), context=None) + x
        x = self.attn2(self.norm2(x), context=context) + x
        return self.ff(self.norm3(x)) + x


class SpatialTransformer(nn.Module):
    """Blocks between picture ``[B, C, H, W]`` and tokens, without the projections around them."""

    def __init__(
        self, channels: int = CHANNELS, heads: int = HEADS, context_channels: int = CONTEXT_CHANNELS, depth: int = 1
    ) -> None:
        super().__init__()
        blocks = [BasicTransformerBlock(channels, heads, context_channels) for _ in range(depth)]
        self.transformer_blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        tokens = x.flatten(2).transpose(1, 2).contiguous()
        for block in self.transformer_blocks:
            tokens = block(tokens, context=context)
        return tokens.transpose(1, 2).view_as(x)


class UNet(nn.Module):
    """The stages of a UNet, each a list of transformers and of what changes the picture's size; nothing else is in it.

    A stage is what LDM keeps at one place of ``input_blocks`` and ``output_blocks``; the middle is a single one.
    """

    def __init__(
        self, down: Iterable[Iterable[nn.Module]], middle: Iterable[nn.Module] = (),
        up: Iterable[Iterable[nn.Module]] = (),
    ) -> None:  # fmt: skip
        super().__init__()
        self.input_blocks = nn.ModuleList(nn.ModuleList(stage) for stage in down)
        self.middle_block = nn.ModuleList(middle)
        self.output_blocks = nn.ModuleList(nn.ModuleList(stage) for stage in up)

    def forward(self, x: Tensor, timesteps: Tensor | None = None, context: Tensor | None = None) -> Tensor:
        for module in chain(*self.input_blocks, self.middle_block, *self.output_blocks):
            x = module(x, context) if isinstance(module, SpatialTransformer) else module(x)
        return x


def make_block(device: str = "cpu", dtype: torch.dtype = torch.float32) -> UNet:
    """A UNet of that one block, with fixed random weights, ready for inference; leaves the global generator alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return UNet([[SpatialTransformer()]]).to(device, dtype).eval().requires_grad_(False)


def make_inputs(side: int, batch: int, device: str, dtype: torch.dtype) -> tuple[Tensor, None, Tensor]:
    """A picture ``[batch, 320, side, side]``, no timestep, and a prompt ``[batch, 77, 768]``, from a fixed seed."""
    generator = torch.Generator().manual_seed(1)
    picture = torch.randn(batch, CHANNELS, side, side, generator=generator)
    prompt = torch.randn(batch, CONTEXT_TOKENS, CONTEXT_CHANNELS, generator=generator)
    return picture.to(device, dtype), None, prompt.to(device, dtype)
