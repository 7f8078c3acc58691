"""The transformer blocks of a Stable Diffusion UNet, found by one table for all families of UNets.

In each of three stages, a module with ``transformer_blocks`` makes the picture's tokens from its 4-D input. Other
modules, such as the temporal layers of video models, are left alone.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import nn

from .intercept import replacement_for

BLOCK = "BasicTransformerBlock"
_KNOWN = (
    "Known are Stable Diffusion 1, 2 and XL, whose UNets have a BasicTransformerBlock, and transformers such as Flux, "
    "SD3 and Wan (tome_core.models.transformer.NAMES)."
)


class UnsupportedModelError(ValueError):
    """The error for a model of an unknown kind, in ComfyUI also for a compiled one; its message says the reason."""


class UNetFamily(NamedTuple):
    """The names of a UNet family's attributes for three stages, and of the class that makes tokens."""

    down: str
    middle: str
    up: str
    transformer: str


FAMILIES = (
    # CompVis, Stability-AI (ldm and sgm), ComfyUI, Forge, reForge
    UNetFamily("input_blocks", "middle_block", "output_blocks", "SpatialTransformer"),
    # diffusers
    UNetFamily("down_blocks", "mid_block", "up_blocks", "Transformer2DModel"),
)

_RESAMPLER = re.compile(r"(?:Fir|K)?(Down|Up)sample(?:2D)?")


class BlockPlace(NamedTuple):
    """A transformer block and its position in the UNet."""

    path: str  # in the UNet
    block: nn.Module
    transformer: nn.Module  # holds the block and makes its tokens
    halvings: int  # how often the latent is halved before it reaches the block


def find_unet(model: Any) -> nn.Module:
    """Return the UNet of a model that a user passes to `patch`, without wrappers.

    Without a UNet it is the ``.transformer`` or the module itself, so that `find_blocks` can name it in an error.

    Args:
        model: a UNet, a diffusers pipeline (``.unet``), an LDM model (``.model.diffusion_model``) or its wrapper
            (``.diffusion_model``). Each may be wrapped by ``torch.compile``, ``DataParallel`` or a similar class.

    Raises:
        TypeError: `model` is not a model.
        UnsupportedModelError: `model` is a pipeline of other networks.
    """
    owner = _unwrap(model)
    candidates = [getattr(holder, name, None) for holder, name in (
        (owner, "unet"), (getattr(owner, "model", None), "diffusion_model"), (owner, "diffusion_model"),
        (owner, "transformer"))]  # fmt: skip
    unet = _unwrap(next((module for module in candidates if isinstance(module, nn.Module)), owner))
    kind = type(unet).__name__
    if not isinstance(unet, nn.Module):
        if isinstance(getattr(model, "components", None), dict):
            networks = [type(part).__name__ for part in model.components.values() if isinstance(part, nn.Module)]
            others = ", ".join(networks) or "no module"
            raise UnsupportedModelError(f"{kind} has neither a UNet nor a transformer, but {others}. {_KNOWN}")
        raise TypeError(
            f"model is {kind}; it has to be a UNet, a diffusers pipeline or an LDM model (with .model.diffusion_model)"
        )
    return unet


def _family_of(module: nn.Module) -> UNetFamily | None:
    """Return the family whose stages the module has: down, and middle or up. None if there is no such family."""
    return next((family for family in FAMILIES if hasattr(module, family.down)
                 and (hasattr(module, family.middle) or hasattr(module, family.up))), None)  # fmt: skip


def find_blocks(unet: nn.Module) -> list[BlockPlace]:
    """Return every transformer block of a UNet, in the order of its stages: down, middle, up.

    Raises `UnsupportedModelError` if no block was found, or if the model has no stages, which show the levels.
    """
    family, kind = _family_of(unet), type(unet).__name__
    places = [] if family is None else list(_places_of(unet, family))
    if places:
        return places
    names = Counter(type(module).__name__ for module in unet.modules())
    telling = Counter({name: n for name, n in names.items() if re.search("Block|Transformer|Attention", name)})
    listing = ", ".join(f"{n} {name}" for name, n in (telling or names).most_common(4))
    ways = [(module, replacement_for(module)) for module in unet.modules()]
    unknown = [module for module, way in ways if way is None and hasattr(module, "to_q")]
    lost = [type(getattr(module, "processor", module)).__name__ for module in unknown]
    why = "where it has the picture's tokens, and what its timestep means, is not known"
    if family is None and any(is_kind(module, known.transformer) for module in unet.modules() for known in FAMILIES):
        why = "without the stages of a UNet the levels of its blocks are unknown; if it is part of a UNet, patch that"
    elif lost or not any(way for _, way in ways):
        why = f"no attention function that is known is called {f'by {lost[0]}' if lost else 'in it'}"
    raise UnsupportedModelError(f"{kind} is not known: {why}; found {listing}. {_KNOWN}")


def is_compiled(unet: nn.Module, places: Sequence[BlockPlace]) -> bool:
    """Return whether a method ``compile``, not a wrapper, compiles a UNet or a part of its blocks, `places`."""
    parts = (unet, *(part for place in places for part in (place.transformer, place.block)))
    return any(part._compiled_call_impl is not None for part in parts)


def is_kind(module: Any, name: str) -> bool:
    """Return whether a module's class or a base class has this name, because every host has copies of the classes."""
    return any(kind.__name__ == name for kind in type(module).__mro__)


def _unwrap(model: Any) -> Any:
    """Return the model inside all wrappers: torch.compile's (``_orig_mod``), DataParallel's and others (``module``)."""
    for name in ("_orig_mod", "module"):
        inner = getattr(model, name, None)
        if isinstance(inner, nn.Module):
            return _unwrap(inner)
    return model


def _places_of(unet: nn.Module, family: UNetFamily) -> Iterator[BlockPlace]:
    """Yield the place of each block (class `BLOCK`) of a UNet, in the order down, middle, up, each block once."""
    for path, module, halvings in walk(unet, family):
        blocks = module._modules.get("transformer_blocks")
        if blocks is not None and is_kind(module, family.transformer):
            for number, block in blocks.named_children():
                if is_kind(block, BLOCK):
                    yield BlockPlace(f"{path}.transformer_blocks.{number}", block, module, halvings)


def walk(unet: nn.Module, family: UNetFamily | None = None) -> Iterator[tuple[str, nn.Module, int]]:
    """Yield path, module, and how often the latent is halved there, for all modules in a UNet's stages, each once.

    Modules inside a transformer that holds blocks are left out. A resampler counts with the size that it makes.
    """
    family, halvings, seen = family or _family_of(unet), 0, set()
    for name in (family.down, family.middle, family.up):
        part = getattr(unet, name, None)
        if part is None:  # a ControlNet has no way up
            continue
        stages = part.named_children() if name != family.middle else [("", part)]
        for key, stage in stages:
            resampling = 0
            waiting = [(f"{name}.{key}".rstrip("."), stage, halvings)]
            while waiting:  # depth first, in the order of the modules; not into modules that hold blocks
                path, module, here = waiting.pop()
                if id(module) in seen:
                    continue
                seen.add(id(module))
                resampler = _RESAMPLER.fullmatch(type(module).__name__)
                if resampler is not None:
                    step = 1 if resampler[1] == "Down" else -1
                    resampling, here = resampling or step, max(0, halvings + step)
                yield path, module, here
                if module._modules.get("transformer_blocks") is not None and is_kind(module, family.transformer):
                    continue
                children = [(f"{path}.{key}", child, here) for key, child in module._modules.items()
                            if child is not None]  # fmt: skip
                waiting += reversed(children)
            if name != family.middle:
                halvings = max(0, halvings + resampling)
