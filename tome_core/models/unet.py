"""UNets of LDM, sgm, Forge and diffusers: where their attentions are, and how their calls are read."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ..compiling import is_tracing
from ..merging.grid import Grid
from ..merging.layout import Layout
from ..reporting.ledger import LevelTally
from ..reporting.reasons import NO_GRID, REPLACED
from .sites import AttentionSite, ModelSite, named
from .unet_blocks import Place, find_blocks
from .unet_parts import LATENTS, BlockAttentionSite, BlockSite, PartSite
from .wrap import Wrap
from .wrap_set import ModelCall, WrapSet

_TIMES = ("timesteps", "timestep", "t")
# parts of a block beside its self-attention, and what they are called there
_PARTS = (("crossattn", "attn2"), ("mlp", "ff"))


class UNetAdapter:
    """What the engine has to know of one UNet. Raises UnsupportedModelError as `find_blocks` does.

    layout: whose strengths it has. downsamples: of each level, the finest first. reads: the arguments that a call is
    read from. It does not hold the UNet.
    """

    reads = ("latent", "timestep")

    def __init__(self, unet: nn.Module) -> None:
        self._unet = weakref.ref(unet)
        depths = sorted({place.halvings for place in self.places})
        self.levels = {depth: level for level, depth in enumerate(depths)}
        self.downsamples = [2**depth for depth in depths]
        self.layout = "sd" if 0 in self.levels else "sdxl"

    @property
    def places(self) -> list[Place]:
        """The UNet's transformer blocks."""
        return find_blocks(self._unet())

    def tallies(self) -> list[LevelTally]:
        """An empty one for each level."""
        places = self.places
        count = [sum(place.halvings == depth for place in places) for depth in self.levels]
        return [LevelTally(down, blocks) for down, blocks in zip(self.downsamples, count, strict=True)]

    def wraps(self, unet: nn.Module, levels: set[int], around: set[int], make: Callable[..., Wrap]) -> Iterator[Wrap]:
        """What has to be put on the UNet, the outermost first.

        Args:
            levels: those where something may merge.
            around: those where parts of blocks may be called with merged tokens.
            make: gives a wrap of a class, of its target and what else it takes.
        """
        yield make(ModelSite, unet)
        before, places = None, self.places
        for place in places:
            level = self.levels[place.halvings]
            if level not in levels:
                continue
            if place.transformer is not before:
                before = place.transformer
                count = sum(one.transformer is before and hasattr(one.block, "attn1") for one in places)
                yield make(TransformerSite, before, level, count)
            yield from self._of_block(place, level, level in around, make)

    def _of_block(self, place: Place, level: int, around: bool, make: Callable[..., Wrap]) -> Iterator[Wrap]:
        path, block = place.path, place.block
        attention = getattr(block, "attn1", None)
        if around:
            yield make(BlockSite, block, level)
        if attention is not None:
            kind = BlockAttentionSite if around else AttentionSite
            yield make(kind, attention, f"{path}.attn1", level, place.halvings)
        for part, name in _PARTS if around else ():
            module = getattr(block, name, None)
            if module is not None:
                yield make(PartSite, module, path, part, level)

    def pick(self, unet: nn.Module, args: tuple, kwargs: Mapping[str, Any]) -> list[Any]:
        """The arguments of `reads`, in a way that a compiler can follow."""
        latent = args[0] if args else named(kwargs, LATENTS)
        return [latent, args[1] if len(args) > 1 else named(kwargs, _TIMES)]

    def read(self, unet: nn.Module, given: Mapping[str, Any], time: Any) -> tuple[Any, Any, Any]:
        """Timestep, latent, and height and width of it if it is a picture."""
        latent = given["latent"]
        is_picture = torch.is_tensor(latent) and latent.dim() >= 4
        return given["timestep"], latent, latent.shape[-2:] if is_picture else None

    def layout_of(self, now: ModelCall, site: AttentionSite, tokens: int) -> Layout | str:
        """The picture's tokens are all there are: those of a model that does not tell where it is, as if compiled."""
        if now.facts is None:
            return NO_GRID
        grid = Grid(*(-(-side // 2**site.halvings) for side in now.facts))
        return Layout(grid) if grid.height * grid.width == tokens else NO_GRID


class TransformerSite(Wrap):
    """Around a transformer of a UNet: reads the grid from its 4-D input, anew at each call.

    level: of its blocks; attentions: how many of them have a wrap.
    """

    def __init__(self, transformer: nn.Module, wraps: WrapSet, level: int, attentions: int) -> None:
        super().__init__(transformer)
        self.wraps, self.level, self.attentions = wraps, level, attentions

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The transformer's output, its attentions knowing the grid."""
        if not (isinstance(self, Wrap) and self.active) or (torch.compiler.is_compiling() and is_tracing()):
            return Wrap.forward(self, *args, **kwargs)
        now, x = self.wraps.calls.now, args[0] if args else named(kwargs, LATENTS)
        if now is None or not torch.is_tensor(x) or x.dim() != 4:
            return self.original(*args, **kwargs)
        now.layouts[self.level], reached = Layout(Grid(*x.shape[2:])), now.reached
        if self.beneath is None:
            out = type(self.target).forward(self.target, *args, **kwargs)
        else:
            out = self.beneath(*args, **kwargs)
        missing = self.attentions - (now.reached - reached)
        if missing <= 0 or (missing == self.attentions and self.beneath is not None):
            return out  # another's wrapper gave what it had kept, as DeepCache's does: nothing ran
        now.reached += missing
        is_traced = bool(now.state.ledger.levels[self.level].traced)  # which says why
        if not is_traced and now.call.rules[self.level].attn is not None:
            tokens = x.shape[2] * x.shape[3]
            for _ in range(missing):
                now.state.leave_alone(now.call, self.level, REPLACED, x.shape[0], tokens, tokens)
        return out
