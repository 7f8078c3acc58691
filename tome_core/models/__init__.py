"""A host's model: where its transformer blocks lie, and how one of its methods is wrapped and set free again."""

from __future__ import annotations

from typing import Any

from torch import nn

from .transformer import TransformerAdapter, family_of, find_transformers
from .unet import UNetAdapter
from .unet_blocks import find_unet

Adapter = UNetAdapter | TransformerAdapter


def find_models(model: Any) -> list[nn.Module]:
    """The known transformers of a pipeline or the one handed over, else the UNet. Raises as `find_unet` does."""
    return find_transformers(model) or [find_unet(model)]


def adapter_of(model: nn.Module) -> Adapter:
    """Raises UnsupportedModelError for a model without blocks that are known."""
    return UNetAdapter(model) if family_of(model) is None else TransformerAdapter(model)
