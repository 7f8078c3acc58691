"""The networks that merge: how to find their attentions, to wrap and unwrap them, and to read their calls."""

from __future__ import annotations

from typing import Any

from torch import nn

from .transformer import TransformerAdapter, family_of, find_transformers
from .unet import UNetAdapter
from .unet_blocks import find_unet

Adapter = UNetAdapter | TransformerAdapter


def find_models(model: Any) -> list[nn.Module]:
    """Return the networks to patch: a pipeline's known transformers, else its UNet, else its one other transformer.

    An LDM model gives its UNet; any other network that is not in a pipeline gives itself, known or not. All are without
    wrappers such as torch.compile's. A TypeError is raised if `model` is not a model, an UnsupportedModelError if it is
    a pipeline of other networks.
    """
    return find_transformers(model) or [find_unet(model)]


def adapter_of(model: nn.Module) -> Adapter:
    """Make the adapter of a UNet or of a known transformer; it raises `UnsupportedModelError` for other models."""
    return UNetAdapter(model) if family_of(model) is None else TransformerAdapter(model)
