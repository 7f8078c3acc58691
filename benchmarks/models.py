"""UNets of Stable Diffusion 1.5's and XL's layouts in plain torch, with LDM's names and random weights.

Nothing is downloaded, and nothing but torch is needed. ``block`` is SD1.5's finest transformer block alone.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import sd_block

BLOCK, SD15, SDXL = NAMES = ("block", "sd15", "sdxl")
_LATENT, _TEXT_TOKENS, _PICTURE_TO_LATENT = 4, 77, 8
_RES_BLOCKS = 2  # of a level on the way down; one more on the way up


class Shape(NamedTuple):
    """One UNet. By level: channels, blocks of a transformer (0: no transformer), heads of an attention.

    middle: blocks of the transformer in the middle. context: channels of a prompt. vector: of what SDXL is told
    besides; 0 without. shrink: by what a latent's sides are divided.
    """

    channels: tuple[int, ...]
    depths: tuple[int, ...]
    heads: tuple[int, ...]
    middle: int
    context: int
    vector: int = 0
    shrink: int = 1


SHAPES = {
    SD15: Shape((320, 640, 1280, 1280), (1, 1, 1, 0), (8, 8, 8, 8), 1, 768),
    SDXL: Shape((320, 640, 1280), (0, 2, 10), (5, 10, 20), 10, 2048, 2816),
}
# the same blocks, and sides in proportion; almost no channels
TINY = {
    SD15: SHAPES[SD15]._replace(channels=(8, 8, 16, 16), heads=(2, 2, 2, 2), context=16, shrink=8),
    SDXL: SHAPES[SDXL]._replace(channels=(8, 16, 16), heads=(1, 2, 2), context=16, vector=32, shrink=8),
}


def _norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(32 if channels % 32 == 0 else 8, channels)


def _embed(channels: int, out: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(channels, out), nn.SiLU(), nn.Linear(out, out))


class ResBlock(nn.Module):
    """Two convolutions, between them the time, and the input added."""

    def __init__(self, channels: int, out: int, time_channels: int) -> None:
        super().__init__()
        self.in_layers = nn.Sequential(_norm(channels), nn.SiLU(), nn.Conv2d(channels, out, 3, padding=1))
        self.emb_layers = nn.Sequential(nn.SiLU(), nn.Linear(time_channels, out))
        self.out_layers = nn.Sequential(_norm(out), nn.SiLU(), nn.Conv2d(out, out, 3, padding=1))
        self.skip = nn.Identity() if channels == out else nn.Conv2d(channels, out, 1)

    def forward(self, x: Tensor, emb: Tensor) -> Tensor:
        return self.skip(x) + self.out_layers(self.in_layers(x) + self.emb_layers(emb)[:, :, None, None])


class SpatialTransformer(sd_block.SpatialTransformer):
    """With its norm and its projections."""

    def __init__(self, channels: int, heads: int, context_channels: int, depth: int) -> None:
        super().__init__(channels, heads, context_channels, depth)
        self.norm = _norm(channels)
        self.proj_in, self.proj_out = nn.Conv2d(channels, channels, 1), nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        return x + self.proj_out(super().forward(self.proj_in(self.norm(x)), context))


class Downsample(nn.Conv2d):
    """Halves the sides of a picture, by its stride."""


class Upsample(nn.Conv2d):
    """Doubles the sides of a picture."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.interpolate(x, scale_factor=2.0))


class UNet(nn.Module):
    """LDM's: its stages, what stands in each, and what is carried from the way down to the way up."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.width = channels = shape.channels[0]
        time_channels = 4 * self.width
        self.time_embed = _embed(self.width, time_channels)
        if shape.vector:
            self.label_emb = _embed(shape.vector, time_channels)

        def stage(channels: int, level: int) -> list[nn.Module]:
            out = shape.channels[level]
            attended = [SpatialTransformer(out, shape.heads[level], shape.context, shape.depths[level])]
            return [ResBlock(channels, out, time_channels), *attended[: shape.depths[level]]]

        down, carried = [[nn.Conv2d(_LATENT, channels, 3, padding=1)]], [channels]
        levels = range(len(shape.channels))
        for level in levels:
            for _ in range(_RES_BLOCKS):
                down.append(stage(channels, level))
                channels = shape.channels[level]
                carried.append(channels)
            if level != levels[-1]:
                down.append([Downsample(channels, channels, 3, stride=2, padding=1)])
                carried.append(channels)
        middle = [ResBlock(channels, channels, time_channels),
                  SpatialTransformer(channels, shape.heads[-1], shape.context, shape.middle),
                  ResBlock(channels, channels, time_channels)]  # fmt: skip
        up = []
        for level in reversed(levels):
            for number in range(_RES_BLOCKS + 1):
                up.append(stage(channels + carried.pop(), level))
                channels = shape.channels[level]
                if level and number == _RES_BLOCKS:
                    up[-1].append(Upsample(channels, channels, 3, padding=1))
        self.input_blocks = nn.ModuleList(map(nn.ModuleList, down))
        self.middle_block = nn.ModuleList(middle)
        self.output_blocks = nn.ModuleList(map(nn.ModuleList, up))
        self.out = nn.Sequential(_norm(channels), nn.SiLU(), nn.Conv2d(channels, _LATENT, 3, padding=1))

    def forward(self, x: Tensor, timesteps: Tensor, context: Tensor, y: Tensor | None = None) -> Tensor:
        """x: ``[B, 4, H, W]``; timesteps: ``[B]``; context: ``[B, M, D]``; y: ``[B, V]``, SDXL's."""
        half = self.width // 2
        scales = torch.exp(torch.arange(half, device=x.device) * (-9.2103 / half))  # down to 1 / 10,000
        angles = timesteps[:, None].float() * scales
        emb = self.time_embed(torch.cat([angles.cos(), angles.sin()], 1).to(x.dtype))
        if y is not None:
            emb = emb + self.label_emb(y)
        carried = []
        for stage in self.input_blocks:
            x = _through(stage, x, emb, context)
            carried.append(x)
        x = _through(self.middle_block, x, emb, context)
        for stage in self.output_blocks:
            x = _through(stage, torch.cat([x, carried.pop()], 1), emb, context)
        return self.out(x)


def _through(stage: Iterable[nn.Module], x: Tensor, emb: Tensor, context: Tensor) -> Tensor:
    for module in stage:
        x = module(x, *{ResBlock: (emb,), SpatialTransformer: (context,)}.get(type(module), ()))
    return x


def make(name: str, device: str, dtype: torch.dtype, tiny: bool = False) -> nn.Module:
    """One of `NAMES` with random weights, ready for inference; leaves the global generator alone.

    Built without memory first: 2.6 billion weights initialised on a CPU and sent over would take a minute.
    """
    if name == BLOCK:
        return sd_block.make_block(device, dtype)
    with torch.device("meta"):
        model = UNet((TINY if tiny else SHAPES)[name])
    model = model.to(dtype).to_empty(device=device).eval().requires_grad_(False)
    generator = torch.Generator(device).manual_seed(0)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            bound = parameter.shape[1:].numel() ** -0.5
            parameter.uniform_(-bound, bound, generator=generator)
        else:
            parameter.fill_(0 if name.endswith("bias") else 1)
    return model


def twin(model: nn.Module) -> nn.Module:
    """A copy that can be patched by itself and shares the weights: four variants of SDXL need the memory of one."""
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, shared)


def inputs(name: str, pixels: int, device: str, dtype: torch.dtype, tiny: bool = False) -> tuple[Tensor, ...]:
    """What a call is given: a picture of so many pixels a side, with its prompt and without: a batch of two."""
    if name == BLOCK:
        return sd_block.make_inputs(pixels // _PICTURE_TO_LATENT, 2, device, dtype)
    shape = (TINY if tiny else SHAPES)[name]
    generator = torch.Generator().manual_seed(1)
    side = pixels // _PICTURE_TO_LATENT // shape.shrink
    latent = torch.randn(1, _LATENT, side, side, generator=generator).repeat(2, 1, 1, 1)
    text = torch.randn(2, _TEXT_TOKENS, shape.context, generator=generator).to(device, dtype)
    vector = [torch.zeros(2, shape.vector, device=device, dtype=dtype)] if shape.vector else []
    return latent.to(device, dtype), torch.full((2,), 500.0, device=device), text, *vector
