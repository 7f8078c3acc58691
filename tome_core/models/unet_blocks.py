"""Where the transformer blocks of a Stable Diffusion UNet are: one table for all families.

Every LDM-style UNet has the same three stages under one of two sets of names, in which a picture's tokens come from the
4-D input of a module that holds ``transformer_blocks``. What else is there (video models' time stacks) is left alone.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import nn

from .intercept import way_of

BLOCK = "BasicTransformerBlock"
_KNOWN = (
    f"What merges are UNets with a {BLOCK}, as Stable Diffusion's 1, 2 and XL, and the transformers in "
    "tome_core.models.transformer.NAMES, Flux, SD3 and Wan among them."
)


class UnsupportedModelError(ValueError):
    """The model is of no kind that is known; says what was found, which question has no answer, and what is known."""


class UNetFamily(NamedTuple):
    """Names by which one family of UNets calls things.

    down, middle, up: attributes of the UNet. transformer: class that turns a picture into tokens.
    """

    name: str
    down: str
    middle: str
    up: str
    transformer: str


FAMILIES = (
    # CompVis, Stability-AI (ldm and sgm), ComfyUI, Forge, reForge
    UNetFamily("ldm", "input_blocks", "middle_block", "output_blocks", "SpatialTransformer"),
    UNetFamily("diffusers", "down_blocks", "mid_block", "up_blocks", "Transformer2DModel"),
)

_RESAMPLER = re.compile(r"(?:Fir|K)?(Down|Up)sample(?:2D)?")


class Place(NamedTuple):
    """One transformer block: where it is, and how often the latent was halved on the way to it."""

    path: str
    block: nn.Module
    transformer: nn.Module
    halvings: int
    family: UNetFamily


def find_unet(model: Any) -> nn.Module:
    """The UNet inside what a user may hand over.

    model: a UNet, a compiled one, a diffusers pipeline (``.unet``), an LDM model (``.model.diffusion_model``) or its
    wrapper (``.diffusion_model``), or ``DataParallel``'s and its like. Of a pipeline without a UNet it is the
    ``.transformer``, so that `find_blocks` can say what was found. Raises TypeError for anything else,
    UnsupportedModelError (a ValueError) for a pipeline of other networks.
    """
    found = _unwrap(model)
    inner = [getattr(owner, name, None) for owner, name in (
        (found, "unet"), (getattr(found, "model", None), "diffusion_model"), (found, "diffusion_model"),
        (found, "transformer"))]  # fmt: skip
    found = _unwrap(next((one for one in inner if isinstance(one, nn.Module)), found))
    kind = type(found).__name__
    if not isinstance(found, nn.Module):
        if isinstance(getattr(model, "components", None), dict):
            networks = [type(one).__name__ for one in model.components.values() if isinstance(one, nn.Module)]
            others = ", ".join(networks) or "no module at all"
            raise UnsupportedModelError(f"{kind} has neither a UNet nor a transformer, but {others}. {_KNOWN}")
        raise TypeError(
            f"model is {kind}; it has to be a UNet, a diffusers pipeline or an LDM model (with .model.diffusion_model)"
        )
    return found


def _family_of(module: nn.Module) -> UNetFamily | None:
    """By its stages: the way down, and what follows it."""
    return next((one for one in FAMILIES if hasattr(module, one.down)
                 and (hasattr(module, one.middle) or hasattr(module, one.up))), None)  # fmt: skip


def find_blocks(unet: nn.Module) -> list[Place]:
    """Every transformer block of the UNet, in the order of its stages.

    Raises UnsupportedModelError, which says why, where there is none and where no stages tell their sizes.
    """
    family, kind = _family_of(unet), type(unet).__name__
    places = [] if family is None else list(_places_of(unet, family))
    if places:
        return places
    names = Counter(type(module).__name__ for module in unet.modules())
    telling = Counter({name: n for name, n in names.items() if re.search("Block|Transformer|Attention", name)})
    found = ", ".join(f"{n} {name}" for name, n in (telling or names).most_common(4))
    ways = [(one, way_of(one)) for one in unet.modules()]
    lost = [type(getattr(one, "processor", one)).__name__ for one, way in ways if way is None and hasattr(one, "to_q")]
    why = "nobody has told where a picture's tokens lie in its sequences, and what its timestep means"
    if family is None and any(is_kind(module, one.transformer) for module in unet.modules() for one in FAMILIES):
        why = "without a UNet's stages nobody knows its blocks' level; if it is a part of a UNet, patch that"
    elif lost or not any(way for _, way in ways):
        why = f"no attention function that is known is called {f'by {lost[0]}' if lost else 'in it'}"
    raise UnsupportedModelError(f"{kind} is not known: {why}; found {found}. {_KNOWN}")


def is_compiled(unet: nn.Module, places: Sequence[Place], handed: Any = None) -> bool:
    """Is the UNet compiled in place, or a transformer or a block of it, or what was handed over, or its ``unet``?"""
    parts = (unet, *(part for place in places for part in (place.transformer, place.block)))
    is_wrapped = any(hasattr(one, "_orig_mod") for one in (handed, getattr(handed, "unet", None)))
    return is_wrapped or any(one._compiled_call_impl is not None for one in parts)


def is_kind(module: Any, name: str) -> bool:
    """Is it of a class of this name, or derived from one? By name, because every host has its own copy."""
    return any(one.__name__ == name for one in type(module).__mro__)


def _unwrap(model: Any) -> Any:
    """Without torch.compile's wrapper, and those that call what they wrap ``module``."""
    for name in ("_orig_mod", "module"):
        inner = getattr(model, name, None)
        if isinstance(inner, nn.Module):
            return _unwrap(inner)
    return model


def _places_of(unet: nn.Module, family: UNetFamily) -> Iterator[Place]:
    """The blocks of each stage; a resampler acts after the transformers of its stage."""
    halvings, seen = 0, set()
    for name in (family.down, family.middle, family.up):
        part = getattr(unet, name, None)
        if part is None:  # a ControlNet has no way up
            continue
        stages = part.named_children() if name != family.middle else [("", part)]
        for key, stage in stages:
            resampling = 0
            waiting = [(f"{name}.{key}".rstrip("."), stage)]
            while waiting:  # in order, and not into what holds blocks
                path, module = waiting.pop()
                if id(module) in seen:
                    continue
                seen.add(id(module))
                blocks = module._modules.get("transformer_blocks")
                if blocks is not None and is_kind(module, family.transformer):
                    for number, block in blocks.named_children():
                        if is_kind(block, BLOCK):
                            yield Place(f"{path}.transformer_blocks.{number}", block, module, halvings, family)
                    continue
                found = _RESAMPLER.fullmatch(type(module).__name__)
                if found is not None and not resampling:
                    resampling = 1 if found[1] == "Down" else -1
                children = [(f"{path}.{key}", one) for key, one in module._modules.items() if one is not None]
                waiting += reversed(children)
            if name != family.middle:
                halvings = max(0, halvings + resampling)
