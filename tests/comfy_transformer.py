"""A stand-in for ComfyUI's transformers: text before a picture's or a film's tokens, in attentions that ask a slot."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests import comfy_attention
from tests.comfy_doubles import BaseModel, Guider, ModelPatcher
from tests.models import fixed

WIDTH, HEADS, TEXT = 32, 2, 32


class CONST:
    """A flow model's levels, from 1 to 0; ComfyUI's have a base of this name."""

    def timestep(self, sigma: torch.Tensor) -> torch.Tensor:
        return sigma

    def percent_to_sigma(self, percent: float) -> float:
        return 1.0 - percent


class Block(nn.Module):
    """Joint attention, then attention from the picture to the text."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, text: int, options: dict) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        attended = comfy_attention.optimized_attention(q, k, v, HEADS, transformer_options=options)
        across = comfy_attention.optimized_attention(q, k[:, :text], v[:, :text], HEADS, transformer_options=options)
        return x + self.out(attended + across)


class Body(nn.Module):
    """Text, then the picture."""

    pad_tokens_multiple, patch_size = 1, 2

    def __init__(self) -> None:
        super().__init__()
        self.img_in, self.txt_in = nn.Linear(16, WIDTH), nn.Linear(TEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.final = nn.Linear(WIDTH, 16)

    def forward(self, x: torch.Tensor, t: Any, context: torch.Tensor, transformer_options: dict) -> torch.Tensor:
        options = {**transformer_options, "block_type": "double"}
        rows, columns = (side // 2 for side in x.shape[2:])
        pieces = nn.functional.pixel_unshuffle(x, 2)
        picture = self.img_in(pieces.flatten(2).mT)
        count = picture.shape[1]
        picture = nn.functional.pad(picture, (0, 0, 0, -count % self.pad_tokens_multiple))
        tokens = torch.cat([self.txt_in(context), picture], 1)
        for number, block in enumerate(self.blocks):
            options["block_index"] = number
            tokens = block(tokens, context.shape[1], options)
        out = self.final(tokens[:, context.shape[1] :][:, :count]).mT
        return nn.functional.pixel_shuffle(out.unflatten(2, (rows, columns)), 2)


class Flux(Body):
    """Known by its name as one whose text comes first."""


class NextDiT(Body):
    """Known by its name as one whose picture comes last; with more tokens behind it, up to a multiple of so many."""

    pad_tokens_multiple = 50


class Unplaced(Body):
    """Has tokens beside the picture's, and a name that tells nothing."""


class FlowGuider(Guider):
    """Samples with it, from pure noise."""

    guidance, stride = 3, 0.1

    def sample(self, steps: int = 3, size: tuple[int, int] = (24, 32), **more: Any) -> torch.Tensor:
        return super().sample(steps=steps, size=size, **more)

    def sigmas(self, steps: int) -> list[float]:
        return [1 - step / steps for step in range(steps + 1)]


def transformer(model: type = Flux) -> ModelPatcher:
    """A loader's output: a flow model."""
    base = BaseModel(fixed(model()))
    base.model_sampling = CONST()
    return ModelPatcher(base)
