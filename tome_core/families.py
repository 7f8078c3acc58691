"""Where the transformer blocks of a Stable Diffusion UNet are: one table for all families.

Every LDM-style UNet has the same three stages under one of two sets of names, and in every one a picture's
tokens come from the 4-D input of a module that holds ``transformer_blocks``. What lies beside them (the time
stacks of video models) has other names and is left alone.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import nn

BLOCK = "BasicTransformerBlock"


class UnsupportedModelError(ValueError):
    """The model has no LDM-style transformer block; says what was looked for and what was found."""


class Family(NamedTuple):
    """Names by which one family of UNets calls things.

    down, middle, up: attributes of the UNet. transformer: class that turns a picture into tokens.
    context, mask: the attention's arguments for what keys and values are made from, and for an attention mask.
    """

    name: str
    down: str
    middle: str
    up: str
    transformer: str
    context: str
    mask: str


FAMILIES = (
    # CompVis, Stability-AI (ldm and sgm), ComfyUI, Forge, reForge
    Family("ldm", "input_blocks", "middle_block", "output_blocks", "SpatialTransformer", "context", "mask"),
    Family(
        "diffusers",
        "down_blocks",
        "mid_block",
        "up_blocks",
        "Transformer2DModel",
        "encoder_hidden_states",
        "attention_mask",
    ),
)

_RESAMPLER = re.compile(r"(?:Fir|K)?(Down|Up)sample(?:2D)?")


class Place(NamedTuple):
    """One transformer block: where it is, and how often the latent was halved on the way to it."""

    path: str
    block: nn.Module
    transformer: nn.Module
    halvings: int
    family: Family


def find_unet(model: Any) -> nn.Module:
    """The UNet inside what a user may hand over.

    model: a UNet, a compiled one, a diffusers pipeline (``.unet``), an LDM model
    (``.model.diffusion_model``) or its wrapper (``.diffusion_model``). Of a pipeline without a UNet it is the
    ``.transformer``, so that `find_blocks` can say what was found. Raises TypeError for anything else.
    """
    found = _unwrapped(model)
    for path in (("unet",), ("model", "diffusion_model"), ("diffusion_model",), ("transformer",)):
        inner = _follow(found, path)
        if isinstance(inner, nn.Module):
            return _unwrapped(inner)
    if isinstance(found, nn.Module):
        return found
    raise TypeError(
        f"model is {type(model).__name__}; it has to be a UNet, a diffusers pipeline or an LDM model "
        "(with .model.diffusion_model)"
    )


def find_blocks(unet: nn.Module) -> list[Place]:
    """Every transformer block of the UNet, in the order of its stages.

    Raises UnsupportedModelError where there is none.
    """
    family = next((f for f in FAMILIES if hasattr(unet, f.down)), None)
    if family is not None:
        places = [place for stage in _stages(unet, family) for place in _blocks_in(*stage, family)]
    else:
        # a transformer by itself: no stages, so every block is at the size of its input
        places = [place for f in FAMILIES for place in _blocks_in("", unet, 0, f)]
    if not places:
        raise UnsupportedModelError(
            f"{type(unet).__name__} has no {BLOCK} inside a "
            f"{' or '.join(f.transformer for f in FAMILIES)}, which is what token merging works on; found "
            f"{_inventory(unet)}. Stable Diffusion 1, 2 and XL UNets have it; Flux, SD3 and other DiT models do not."
        )
    return places


def is_kind(module: Any, name: str) -> bool:
    """Is it of a class of this name, or derived from one? By name, because every host has its own copy."""
    return any(cls.__name__ == name for cls in type(module).__mro__)


def _follow(model: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        model = getattr(model, name, None)
    return model


def _unwrapped(model: Any) -> Any:
    while isinstance(getattr(model, "_orig_mod", None), nn.Module):  # torch.compile's wrapper
        model = model._orig_mod
    return model


def _stages(unet: nn.Module, family: Family) -> Iterator[tuple[str, nn.Module, int]]:
    """(path, module, halvings) of each stage; a resampler acts after the transformers of its stage."""
    halvings = 0
    for name in (family.down, family.middle, family.up):
        part = getattr(unet, name, None)
        stages = part.named_children() if name != family.middle else [("", part)]
        for key, stage in stages if part is not None else ():
            yield f"{name}.{key}".rstrip("."), stage, halvings
            if name != family.middle:
                halvings = max(0, halvings + _resampling(stage))


def _resampling(stage: nn.Module) -> int:
    for module in stage.modules():
        match = _RESAMPLER.fullmatch(type(module).__name__)
        if match:
            return 1 if match[1] == "Down" else -1
    return 0


def _blocks_in(path: str, stage: nn.Module, halvings: int, family: Family) -> Iterator[Place]:
    for name, module in stage.named_modules():
        blocks = getattr(module, "transformer_blocks", None)
        if not is_kind(module, family.transformer) or blocks is None:
            continue
        for key, block in blocks.named_children():
            if is_kind(block, BLOCK):
                where = ".".join(part for part in (path, name, "transformer_blocks", key) if part)
                yield Place(where, block, module, halvings, family)


def _inventory(model: nn.Module) -> str:
    kinds = Counter(type(module).__name__ for module in model.modules())
    telling = [(n, kind) for kind, n in kinds.items() if re.search("Block|Transformer|Attention", kind)]
    chosen = sorted(telling, reverse=True)[:4] or sorted(((n, kind) for kind, n in kinds.items()), reverse=True)[:4]
    return ", ".join(f"{n} {kind}" for n, kind in chosen)
