"""UNets of LDM, sgm, Forge and diffusers: where their attentions and blocks are, and how their calls are read.

The adapter wraps the UNet (`ModelSite`) and, in levels that merge, transformers (`TransformerSite`) and self-attentions
(`AttentionSite`). If whole blocks may merge there, it wraps all blocks of a transformer but the first
(`WholeBlockSite`), and that one if it is compiled (`WholeTokensWrap`). If parts may merge as in tomesd, it wraps blocks
(`BlockInputSite`), their self-attentions (`BlockAttentionSite`) and their other parts (`PartSite`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ..engine.decision import ModelCall
from ..merging.grid import Grid, Layout
from ..reporting.ledger import NO_GRID, LevelTally, Reason
from .fewer_tokens import BlockAttentionSite, BlockInputSite, PartSite, WholeBlockSite
from .outer_wrap import WholeTokensWrap
from .sites import LATENTS, AttentionSite, ModelSite, TransformerSite, named
from .unet_blocks import BlockPlace, find_blocks
from .weights import channels_of, of_block, outside_blocks
from .wrap import Wrap
from .wrap_set import Ways

_TIMES = ("timesteps", "timestep", "t")
# parts of a block in addition to its self-attention: the name in a rule, and the attribute of the block
KEEP_WHOLE = 1  # first blocks of each transformer that keep all tokens, if whole blocks merge
_PARTS = (("crossattn", "attn2"), ("mlp", "ff"))


class UNetAdapter:
    """The adapter of a UNet, whose blocks are held weakly: it finds the attentions and reads the model's calls.

    For each call, `read` gets the values that `pick` returns. `layout_of` serves each attention in the call.

    Attributes:
        curve: the name of the curve of strengths: "sd" if blocks see the latent at full size, else "sdxl".
        downsamples: the down-sampling factor of each level, the finest first.
        levels: the number of each level, 0 for the finest, by how often the latent is halved there.
        reads: names for the values that `pick` returns.
    """

    reads = ("latent", "timestep")

    def __init__(self, unet: nn.Module) -> None:
        depths = sorted({place.halvings for place in self._search(unet)})
        self.levels = {depth: level for level, depth in enumerate(depths)}
        self.downsamples = [2**depth for depth in depths]
        self.curve = "sd" if 0 in self.levels else "sdxl"
        self._unet = weakref.ref(unet)

    def _search(self, unet: nn.Module) -> list[BlockPlace]:
        """Search the UNet's transformer blocks, keep weak references to them for `places`, and return their places."""
        places = find_blocks(unet)
        self._kept = [place._replace(block=weakref.ref(place.block), transformer=weakref.ref(place.transformer))
                      for place in places]  # fmt: skip
        return places

    @property
    def places(self) -> list[BlockPlace]:
        """The UNet's transformer blocks, as the adapter's making or `wraps` found them, without those that are gone."""
        found = [place._replace(block=place.block(), transformer=place.transformer()) for place in self._kept]
        return [place for place in found if place.block is not None and place.transformer is not None]

    @property
    def outside(self) -> float:
        """The number of weights outside blocks by which each cell of the latent is multiplied, on average."""
        return outside_blocks(self._unet())

    def tallies(self) -> list[LevelTally]:
        """Return an empty tally, with the number of blocks, for each level, the finest first."""
        tallies = []
        for depth, down in zip(self.levels, self.downsamples, strict=True):
            blocks = [place.block for place in self.places if place.halvings == depth]
            weights = sum(map(of_block, blocks)) // len(blocks) if blocks else 0
            channels = max(map(channels_of, blocks), default=0)
            tallies.append(LevelTally(down, len(blocks), channels=channels, per_token=weights))
        return tallies

    def wraps(self, unet: nn.Module, ways: Ways, make: Callable) -> Iterator[Wrap]:
        """Yield the wraps to put on the UNet, the outermost first; below it only levels in `ways` get wraps.

        With "tomesd" in a level's value, its blocks and their parts get wraps: parts may be called with merged tokens.
        With "blocks" alone, each transformer's blocks do, the first around compiled code only. `make` takes a class of
        wraps, the module to wrap and further arguments of the class, and returns a wrap.
        """
        yield make(ModelSite, unet)
        before, places = None, self._search(unet)  # blocks may have been exchanged since the adapter was made
        for place in places:
            level = self.levels[place.halvings]
            if level not in ways:
                continue
            if place.transformer is not before:
                before = place.transformer
                siblings = [other for other in places if other.transformer is before]
                names = {f"{other.path}.attn1" for other in siblings if getattr(other.block, "attn1", None) is not None}
                yield make(TransformerSite, before, level, names)
            kind, parts, package = AttentionSite, (), ()
            if "tomesd" in ways[level]:
                kind, parts, package = BlockAttentionSite, _PARTS, (type(place.block).__module__,)
                yield make(BlockInputSite, place.block, level)
            elif "blocks" in ways[level] and siblings.index(place) < KEEP_WHOLE:
                yield make(WholeTokensWrap, place.block)
            elif "blocks" in ways[level]:
                yield make(WholeBlockSite, place.block, place.path, level)
            if getattr(place.block, "attn1", None) is not None:
                yield make(kind, place.block.attn1, f"{place.path}.attn1", level, place.halvings, *package)
            for part, name in parts:
                if getattr(place.block, name, None) is not None:
                    yield make(PartSite, getattr(place.block, name), f"{place.path}.{name}", level, part, *package)

    def pick(self, unet: nn.Module, args: tuple, kwargs: Mapping[str, Any]) -> list[Any]:
        """Return latent and timestep, by place or by known names, None for a missing one. A compiler can trace this."""
        latent = args[0] if args else named(kwargs, LATENTS)
        return [latent, args[1] if len(args) > 1 else named(kwargs, _TIMES)]

    def read(self, unet: nn.Module, given: Mapping[str, Any], time: Any) -> tuple[Any, Any, Any]:
        """Return timestep, latent and facts of a call: the latent's height and width, None if it is no picture.

        `given` holds what `pick` returns by the names in `reads`; `time` is not used.
        """
        latent = given["latent"]
        is_picture = torch.is_tensor(latent) and latent.dim() >= 4
        return given["timestep"], latent, latent.shape[-2:] if is_picture else None

    def layout_of(self, call: ModelCall, site: AttentionSite, tokens: int) -> Layout | Reason:
        """Return the layout of the picture's tokens, or the reason why it is not known or does not fit `tokens`."""
        layout = call.layouts.get(site.level)
        if layout is None and call.facts is not None:  # in a compiled model no `TransformerSite` reads the grid
            layout = Layout(Grid(*(-(-side // 2**site.halvings) for side in call.facts)))
        return NO_GRID if layout is None or layout.grid.height * layout.grid.width != tokens else layout
