"""UNets of transformers alone, with LDM's names, to measure and test what depends on nothing around a transformer."""

from collections.abc import Iterable
from itertools import chain

import torch
from torch import Tensor, nn

from benchmarks.models import BasicTransformerBlock

CHANNELS, HEADS, CONTEXT_CHANNELS, CONTEXT_TOKENS = 320, 8, 768, 77


class SpatialTransformer(nn.Module):
    """Blocks between picture ``[B, C, H, W]`` and tokens, without the projections around them."""

    def __init__(self, channels: int = CHANNELS, heads: int = HEADS, context_channels: int = CONTEXT_CHANNELS,
                 depth: int = 1) -> None:  # fmt: skip
        super().__init__()
        blocks = [BasicTransformerBlock(channels, heads, context_channels) for _ in range(depth)]
        self.transformer_blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        tokens = x.flatten(2).transpose(1, 2).contiguous()
        for block in self.transformer_blocks:
            tokens = block(tokens, context=context)
        return tokens.transpose(1, 2).view_as(x)


class UNet(nn.Module):
    """A UNet of transformers and modules that resize the picture; a stage is one of LDM's ``input_blocks``."""

    def __init__(self, down: Iterable[Iterable[nn.Module]], middle: Iterable[nn.Module] = (),
                 up: Iterable[Iterable[nn.Module]] = ()) -> None:  # fmt: skip
        super().__init__()
        self.input_blocks = nn.ModuleList(nn.ModuleList(stage) for stage in down)
        self.middle_block = nn.ModuleList(middle)
        self.output_blocks = nn.ModuleList(nn.ModuleList(stage) for stage in up)

    def forward(self, x: Tensor, timesteps: Tensor | None = None, context: Tensor | None = None) -> Tensor:
        for module in chain(*self.input_blocks, self.middle_block, *self.output_blocks):
            x = module(x, context) if isinstance(module, SpatialTransformer) else module(x)
        return x


def make_block(device: str = "cpu", dtype: torch.dtype = torch.float32) -> UNet:
    """Make a UNet of one block of SD1.5's size, with fixed random weights; leave the global generator alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return UNet([[SpatialTransformer()]]).to(device, dtype).eval().requires_grad_(False)


def make_inputs(side: int, batch: int, device: str, dtype: torch.dtype) -> tuple[Tensor, None, Tensor]:
    """Draw a picture ``[batch, 320, side, side]`` and a prompt ``[batch, 77, 768]`` from a fixed seed; no timestep."""
    generator = torch.Generator().manual_seed(1)
    picture = torch.randn(batch, CHANNELS, side, side, generator=generator)
    prompt = torch.randn(batch, CONTEXT_TOKENS, CONTEXT_CHANNELS, generator=generator)
    return picture.to(device, dtype), None, prompt.to(device, dtype)
