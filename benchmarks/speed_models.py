"""UNets and decoders of the real shapes with random weights, made on the spot: speed asks for nothing else."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from torch import nn

from tome_core.measuring.measure import pictures_in

_DOWN, _UP, _CROSS = "DownBlock2D", "UpBlock2D", ("CrossAttnDownBlock2D", "CrossAttnUpBlock2D")
_TEXT_TOKENS = 77
_PICTURE_TO_LATENT = 8


class Shape(NamedTuple):
    """One model: the settings of its UNet and decoder.

    work: floating-point operations of one unpatched call for one sample, as ``torch.utils.flop_counter`` counts them:
    in any case, for each pixel of the latent, for each pair of pixels. shrink: by what the sides of a latent are
    divided in tiny models.
    """

    unet: dict[str, Any]
    work: tuple[float, float, float] = (0.0, 0.0, 0.0)
    decoder_channels: tuple[int, ...] = (128, 256, 512, 512)
    shrink: int = 1

    def side(self, pixels: int) -> int:
        """Side of the latent that the UNet gets for a picture of so many pixels."""
        return pixels // _PICTURE_TO_LATENT // self.shrink

    def operations(self, pixels: int) -> float:
        """Floating-point operations of one unpatched call for one picture of so many pixels a side."""
        once, each, pair = self.work
        area = self.side(pixels) ** 2
        return once + each * area + pair * area**2


_SD15 = {"sample_size": 64, "cross_attention_dim": 768, "attention_head_dim": 8}
_SDXL = {
    "sample_size": 128, "cross_attention_dim": 2048, "block_out_channels": (320, 640, 1280),
    "down_block_types": (_DOWN, _CROSS[0], _CROSS[0]), "up_block_types": (_CROSS[1], _CROSS[1], _UP),
    "attention_head_dim": (5, 10, 20), "transformer_layers_per_block": (1, 2, 10), "use_linear_projection": True,
    "addition_embed_type": "text_time", "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 2816,
}  # fmt: skip
_TINY = {"norm_num_groups": 8, "cross_attention_dim": 16, "layers_per_block": 1}
SHAPES = {
    "sd15": Shape(_SD15, (3.008e9, 1.6547e8, 7301.0)),
    "sdxl": Shape(_SDXL, (5.2531e10, 3.6359e8, 2800.0)),
}
# for rehearsals: the same stages and sides in proportion, almost no channels
TINY_SHAPES = {
    "sd15": Shape({**_SD15, **_TINY, "attention_head_dim": 2, "block_out_channels": (8, 8, 16, 16)}, shrink=8,
                  decoder_channels=(8, 8, 8, 8)),
    "sdxl": Shape(
        {**_SDXL, **_TINY, "attention_head_dim": (1, 2, 2), "block_out_channels": (8, 16, 16),
         "transformer_layers_per_block": (1, 1, 2), "addition_time_embed_dim": 4,
         "projection_class_embeddings_input_dim": 32}, shrink=8, decoder_channels=(8, 8, 8, 8),
    ),
}  # fmt: skip


def make_unet(shape: Shape, device: str, dtype: torch.dtype) -> nn.Module:
    """The UNet with random weights, ready for inference; leaves the global generator alone."""
    return _fill(lambda: UNet2DConditionModel(**shape.unet), device, dtype)


def make_decoder(shape: Shape, device: str, dtype: torch.dtype) -> nn.Module:
    """The autoencoder that turns a latent into a picture."""
    stages = len(shape.decoder_channels)
    settings = {
        "down_block_types": ("DownEncoderBlock2D",) * stages, "up_block_types": ("UpDecoderBlock2D",) * stages,
        "block_out_channels": shape.decoder_channels, "latent_channels": 4, "layers_per_block": 2,
        "norm_num_groups": min(32, shape.decoder_channels[0]),
    }  # fmt: skip
    return _fill(lambda: AutoencoderKL(**settings), device, dtype)


def _fill(build: Callable[[], nn.Module], device: str, dtype: torch.dtype) -> nn.Module:
    """Built without memory first: 2.6 billion weights initialised on a CPU and sent over would take a minute."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            model = build()
    finally:
        torch.set_default_dtype(before)
    model = model.to_empty(device=device).eval().requires_grad_(False)
    generator = torch.Generator(device).manual_seed(0)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            bound = parameter.shape[1:].numel() ** -0.5
            parameter.uniform_(-bound, bound, generator=generator)
        else:
            parameter.fill_(0 if name.endswith("bias") else 1)
    return model


def twin(model: nn.Module) -> nn.Module:
    """A copy that can be patched by itself and shares the weights: six variants of SDXL need the memory of one."""
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, shared)


def make_inputs(shape: Shape, pixels: int, batch: int, device: str, dtype: torch.dtype) -> tuple[tuple, dict]:
    """What a call of the UNet gets: latents of `pictures_in` it, a timestep, prompts, and what SDXL is told besides."""
    generator = torch.Generator().manual_seed(1)
    side, width = shape.side(pixels), shape.unet["cross_attention_dim"]
    pictures = pictures_in(batch)
    latent = torch.randn(pictures, 4, side, side, generator=generator).repeat(batch // pictures, 1, 1, 1)
    latent = latent.to(device, dtype)
    text = torch.randn(batch, _TEXT_TOKENS, width, generator=generator).to(device, dtype)
    # a tensor on the device: a number would be copied there in every call
    return (latent, torch.tensor(500, device=device), text), _add_inputs(shape, batch, device, dtype)


def _add_inputs(shape: Shape, batch: int, device: str, dtype: torch.dtype) -> dict[str, Any]:
    if "addition_embed_type" not in shape.unet:
        return {}
    times = 6
    width = shape.unet["projection_class_embeddings_input_dim"] - times * shape.unet["addition_time_embed_dim"]
    ids = torch.tensor([1024.0, 1024, 0, 0, 1024, 1024], device=device, dtype=dtype).expand(batch, -1)
    return {"added_cond_kwargs": {"text_embeds": torch.zeros(batch, width, device=device, dtype=dtype),
                                  "time_ids": ids}}  # fmt: skip
