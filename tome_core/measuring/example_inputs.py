"""Arguments for a call of a UNet, made up from its shape: for measurements, when no picture is being made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from ..models.unet_blocks import Place
from .fingerprint import widths_of

_TEXT_TOKENS = 77
_TIMES = 6  # sizes and crops that SDXL is told

CallUNet = Callable[[torch.Tensor, torch.Tensor], Any]


def latents(unet: nn.Module, shape: tuple[int, int, int], device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Noise ``[B, C, H, W]`` of `pictures_in` the batch, from a generator of its own. shape: (batch, height, width)."""
    batch, height, width = shape
    channels = next((one.in_channels for one in unet.modules() if isinstance(one, nn.Conv2d)), None)
    if channels is None:  # a UNet without convolutions is a bench's, as wide as its tokens
        channels = next(one.in_features for one in unet.modules() if isinstance(one, nn.Linear))
    pictures = pictures_in(batch)
    noise = torch.randn(pictures, channels, height, width, generator=torch.Generator().manual_seed(0))
    return noise.repeat(batch // pictures, 1, 1, 1).to(device, dtype)


def pictures_in(batch: int) -> int:
    """An even batch holds every picture twice, as guidance asks for a prompt and a negative one."""
    return batch // 2 if batch % 2 == 0 else batch


def call_of(
    unet: nn.Module, place: Place, batch: int, device: torch.device, dtype: torch.dtype,
    told: Mapping[str, Any] | None = None,
) -> CallUNet:  # fmt: skip
    """``(latents [B, C, H, W], timesteps [B])`` to whatever the UNet's forward makes of them.

    place: any block of it. told: keywords of its forward, which is called so that others' hooks are told of no step.
    Raises ValueError for a UNet that wants to be told more than prompts, sizes and classes.
    """
    width = widths_of(place.block)[1]
    text = torch.randn(batch, _TEXT_TOKENS, width, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    if place.family.name == "diffusers":
        added = {**_add_inputs(unet, batch, device, dtype), **(told or {})}
        return lambda x, timesteps: unet.forward(x, timesteps, encoder_hidden_states=text, **added)
    classes = {**_classes(unet, batch, device, dtype), **(told or {})}
    return lambda x, timesteps: unet.forward(x, timesteps, text, **classes)


def _add_inputs(unet: nn.Module, batch: int, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    config = unet.config
    kind = getattr(config, "addition_embed_type", None)
    asks = [name for name in ("class_embed_type", "num_class_embeds", "encoder_hid_dim_type", "time_cond_proj_dim")
            if getattr(config, name, None) is not None]  # fmt: skip
    if kind not in (None, "text_time") or "Motion" in type(unet).__name__:
        asks.append(kind or "frames")
    if asks:
        raise ValueError(
            f"{type(unet).__name__} wants to be told more than a prompt ({', '.join(asks)}): give measure() a call= of "
            "latents and timesteps that calls the UNet's forward"
        )
    if kind is None:
        return {}
    width = config.projection_class_embeddings_input_dim - _TIMES * config.addition_time_embed_dim
    told = {"text_embeds": torch.zeros(batch, width, device=device, dtype=dtype),
            "time_ids": torch.zeros(batch, _TIMES, device=device, dtype=dtype)}  # fmt: skip
    return {"added_cond_kwargs": told}


def _classes(unet: nn.Module, batch: int, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """SDXL's vector in its original form, or a class's number."""
    embedding = getattr(unet, "label_emb", None)
    if embedding is None:
        return {}
    first = next((one for one in embedding.modules() if isinstance(one, nn.Linear)), None)
    if first is None:
        return {"y": torch.zeros(batch, dtype=torch.int64, device=device)}
    return {"y": torch.zeros(batch, first.in_features, device=device, dtype=dtype)}
