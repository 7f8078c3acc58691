"""Host models: how to find their transformer blocks, and how to wrap and unwrap methods of their modules."""

from __future__ import annotations

from typing import Any

from torch import nn

from .transformer import TransformerAdapter, family_of, find_transformers
from .unet import UNetAdapter
from .unet_blocks import find_unet

Adapter = UNetAdapter | TransformerAdapter


def find_models(model: Any) -> list[nn.Module]:
    """Return the networks to patch: the known transformers of a pipeline, or else the result of `find_unet` alone.

    Args:
        model: a pipeline, a transformer, a UNet, or another object that `find_unet` accepts. A network that is not in
            a pipeline is returned itself, known or not, without wrappers such as torch.compile's.

    Raises:
        TypeError: `model` is not a model.
        UnsupportedModelError: `model` is a pipeline that has neither a transformer, known or not, nor a UNet.
    """
    return find_transformers(model) or [find_unet(model)]


def adapter_of(model: nn.Module) -> Adapter:
    """Make the adapter of a UNet or of a known transformer: the object that finds its attentions and reads its calls.

    Raises:
        UnsupportedModelError: `model` is not a known transformer and has no known blocks of a UNet.
    """
    return UNetAdapter(model) if family_of(model) is None else TransformerAdapter(model)
