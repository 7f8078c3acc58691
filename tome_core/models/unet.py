"""UNets of LDM, sgm, Forge and diffusers: where their attentions are, and how their calls are read.

Beside keys and values in their attentions, parts of their blocks may be called with merged tokens: tomesd's way, for
`apply_patch` and its settings. Every LDM-style block runs ``x = attn1(norm1(x)) + x``, then the same with ``attn2`` and
``ff``. Merging before such a part and unmerging after it needs no line of the block, so whatever hooks it from outside
goes on seeing all tokens.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from ..engine.decision import Call
from ..merging.grid import Grid, Layout
from ..reporting.ledger import MASKED, NO_GRID, OF_OTHERS, LevelTally
from .sites import CONTEXTS, LATENTS, MASKS, AttentionSite, ModelSite, TransformerSite, named
from .unet_blocks import Place, find_blocks
from .wrap import Wrap, WrapSet

_TIMES = ("timesteps", "timestep", "t")
_IN_GRAPH = "its parts merge by a rule that compiled blocks do not follow"
_UNKNOWN_CALL = "called in an unknown way"
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
                own = (one for one in places if one.transformer is before)
                names = {f"{one.path}.attn1" for one in own if getattr(one.block, "attn1", None) is not None}
                yield make(TransformerSite, before, level, names)
            kind, parts = AttentionSite, ()
            if level in around:
                kind, parts = BlockAttentionSite, _PARTS
                yield make(BlockSite, place.block, level)
            if getattr(place.block, "attn1", None) is not None:
                yield make(kind, place.block.attn1, f"{place.path}.attn1", level, place.halvings)
            for part, name in parts:
                if getattr(place.block, name, None) is not None:
                    yield make(PartSite, getattr(place.block, name), place.path, part, level)

    def pick(self, unet: nn.Module, args: tuple, kwargs: Mapping[str, Any]) -> list[Any]:
        """The arguments of `reads`, in a way that a compiler can follow."""
        latent = args[0] if args else named(kwargs, LATENTS)
        return [latent, args[1] if len(args) > 1 else named(kwargs, _TIMES)]

    def read(self, unet: nn.Module, given: Mapping[str, Any], time: Any) -> tuple[Any, Any, Any]:
        """Timestep, latent, and height and width of it if it is a picture."""
        latent = given["latent"]
        is_picture = torch.is_tensor(latent) and latent.dim() >= 4
        return given["timestep"], latent, latent.shape[-2:] if is_picture else None

    def layout_of(self, now: Call, site: AttentionSite, tokens: int) -> Layout | str:
        """The picture's tokens are all there are."""
        layout = now.layouts.get(site.level)
        if layout is None and now.facts is not None:  # a compiled model does not tell where it is
            layout = Layout(Grid(*(-(-side // 2**site.halvings) for side in now.facts)))
        return NO_GRID if layout is None or layout.grid.height * layout.grid.width != tokens else layout


class BlockSite(Wrap):
    """Around a block: holds its input while its parts run."""

    def __init__(self, block: nn.Module, wraps: WrapSet, level: int) -> None:
        # LDM blocks run `_forward` inside their own gradient checkpoint, so only that is seen when it is repeated
        super().__init__(block, "_forward" if hasattr(type(block), "_forward") else "forward")
        self.wraps, self.level = wraps, level

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """The block's output, its parts able to merge."""
        now, x = self.wraps.calls.now or self.wraps.resumed(), args[0] if args else named(kwargs, LATENTS)
        if now is None:
            return self.original(*args, **kwargs)
        before, now.block = now.block, self._open(now, x)
        try:
            return self.original(*args, **kwargs)
        finally:
            now.block = before

    def _open(self, now: Call, x: Any) -> tuple[torch.Tensor, dict] | None:
        if not torch.is_tensor(x) or x.dim() != 3:
            return None
        layout = now.layouts.get(self.level)
        if layout is None or layout.grid.height * layout.grid.width != x.shape[1]:
            now.state.leave_alone(self.level, NO_GRID, x.shape[0], x.shape[1], x.shape[1], "block")
            return None
        return x, {}


class PartSite(Wrap):
    """Around ``attn2`` or ``ff``: merges its input, unmerges its output.

    block: its path. part: "crossattn" or "mlp".
    """

    def __init__(self, module: nn.Module, wraps: WrapSet, block: str, part: str, level: int) -> None:
        super().__init__(module)
        self.wraps, self.block, self.part, self.level = wraps, block, part, level

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """What the part gives."""
        now = self.wraps.calls.now or self.wraps.resumed()
        if now is None or now.block is None or getattr(now.rules[self.level], self.part) is None:
            return self.original(*args, **kwargs)
        return _run_around(self, now, self.block, self.part, args, kwargs)

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """In a graph nothing merges here."""
        state = self.wraps.handle
        if state is not None and any(getattr(rule, f"merge_{self.part}") for rule in state.clock.rules):
            state.ledger.note_traced(self.level, _IN_GRAPH)
        return self.original(*args, **kwargs)


class BlockAttentionSite(AttentionSite):
    """A self-attention of such a block: tomesd's way if the rule in force is tomesd's, else as every other."""

    def _merge(self, now: Call, args: tuple, kwargs: dict[str, Any]) -> Any:
        if not now.rules[self.level].attn.is_as_tomesd:
            return super()._merge(now, args, kwargs)
        if now.block is None:
            return self.original(*args, **kwargs)
        return _run_around(self, now, self.path.removesuffix(".attn1"), "attn", args, kwargs)


def _run_around(site: Any, now: Call, path: str, part: str, args: tuple, kwargs: dict[str, Any]) -> Any:
    """What the part of the block gives, on merged tokens if that can be. path: of the block."""
    (x, plans), level = now.block, site.level
    tokens, context = x.shape[1], args[1] if len(args) > 1 else named(kwargs, CONTEXTS)
    problem, out = _problem_of(part, site.target, x, args, kwargs, context), None
    if problem:
        now.state.leave_alone(level, problem, x.shape[0], tokens, tokens, part)
    else:
        keys = {"attn": tokens, "mlp": 0}.get(part, context.shape[1] if torch.is_tensor(context) else 0)
        function = partial(_call_merged, site.original, args, kwargs, tokens if part == "attn" else 0)
        out = now.state.around(now, path, level, part, now.layouts[level].grid, x, function, plans, keys)
    return site.original(*args, **kwargs) if out is None else out


def _call_merged(original: Callable, args: tuple, kwargs: dict[str, Any], tokens: int, merge: Callable) -> Any:
    """The part on tokens that ``merge`` has merged. tokens: of contexts and values that merge as well; 0 for none."""

    def merged(one: Any) -> Any:
        return merge(one) if torch.is_tensor(one) and one.dim() == 3 and one.shape[1] == tokens else one

    more = {name: merged(one) if name in (*CONTEXTS, "value") else one for name, one in kwargs.items()}
    return original(merge(args[0]), *(merged(one) for one in args[1:2]), *args[2:], **more)


def _problem_of(part: str, module: nn.Module, x: torch.Tensor, args: tuple, kwargs: dict, context: Any) -> str:
    """Why a part cannot be called with merged tokens; "" if it can. x: the block's input."""
    if not args or not torch.is_tensor(args[0]) or args[0].dim() != 3 or (part == "attn" and len(args) > 2):
        return _UNKNOWN_CALL
    if args[0].shape[:2] != x.shape[:2]:
        return NO_GRID
    masks = [kwargs.get(name) for name in MASKS]
    if part == "attn":
        if any(mask is not None for mask in masks):
            return MASKED
        if kwargs.get("n_times_crossframe_attn_in_self"):  # sgm: keys of some samples serve others
            return "cross-frame attention needs every token"
        if context is not None and not (torch.is_tensor(context) and context.shape == args[0].shape):
            return OF_OTHERS
    if part == "crossattn":
        if any(torch.is_tensor(mask) and mask.dim() > 2 and mask.shape[-2] > 1 for mask in masks):
            return "an attention mask for single tokens came along"
        if kwargs.get("ip_adapter_masks") is not None:  # cut to the number of queries as if they were a picture
            return "an adapter's mask needs every token"
    # a hook of diffusers' with a state, as of pyramid attention broadcast, answers with the output of an earlier step,
    # which would be another match's
    hooks = getattr(getattr(module, "_diffusers_hook", None), "hooks", None) or {}
    names = [type(hook).__name__ for hook in hooks.values() if getattr(hook, "_is_stateful", False)]
    return f"{' and '.join(names)} keeps outputs for other steps; put on after merging, both work" if names else ""
