"""UNets of LDM, sgm, Forge and diffusers: where their attentions are, and how their calls are read.

Every LDM-style block runs ``x = attn1(norm1(x)) + x``, then the same with ``attn2`` and ``ff``. Such a part can also be
called with merged tokens, as tomesd does: they merge before it and unmerge after it. The block's own code does not
change, so hooks on the block still see all tokens.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from ..attention.descriptions import full_name
from ..engine.decision import ModelCall
from ..merging.grid import Grid, Layout
from ..reporting.ledger import ARGUMENTS, MASKED, NO_GRID, OF_OTHERS, PARTS_COMPILED, REPLACED, LevelTally
from .sites import CONTEXTS, LATENTS, MASKS, AttentionSite, ModelSite, TransformerSite, named
from .unet_blocks import BlockPlace, find_blocks
from .wrap import Levels, Wrap, WrapSet, foreign_method_on, is_own, why_missed

_TIMES = ("timesteps", "timestep", "t")
# parts of a block in addition to its self-attention: the name in a rule, and the attribute of the block
_PARTS = (("crossattn", "attn2"), ("mlp", "ff"))


class UNetAdapter:
    """The adapter of a UNet, which is held weakly: it finds the attentions and reads the model's calls.

    For each call, `read` gets the values that `pick` returns. `layout_of` serves each attention in the call. A UNet
    without known blocks raises `UnsupportedModelError`.

    Attributes:
        layout: the table of strengths that applies: "sd" if blocks see the latent at full size, else "sdxl".
        downsamples: the down-sampling factor of each level, the finest first.
        levels: the number of each level, 0 for the finest, by how often the latent is halved there.
        reads: names for the values that `pick` returns.
    """

    reads = ("latent", "timestep")

    def __init__(self, unet: nn.Module) -> None:
        self._unet = weakref.ref(unet)
        depths = sorted({place.halvings for place in self.places})
        self.levels = {depth: level for level, depth in enumerate(depths)}
        self.downsamples = [2**depth for depth in depths]
        self.layout = "sd" if 0 in self.levels else "sdxl"

    @property
    def places(self) -> list[BlockPlace]:
        """The UNet's transformer blocks, which are searched at each access."""
        return find_blocks(self._unet())

    def tallies(self) -> list[LevelTally]:
        """Return an empty tally, with the number of blocks, for each level, the finest first."""
        places = self.places
        count = [sum(place.halvings == depth for place in places) for depth in self.levels]
        return [LevelTally(down, blocks) for down, blocks in zip(self.downsamples, count, strict=True)]

    def wraps(self, unet: nn.Module, levels: Levels, make: Callable) -> Iterator[Wrap]:
        """Yield the wraps to put on the UNet, the outermost first.

        Below the UNet only `levels` get wraps, on transformers and self-attentions. With "tomesd" in a level's value,
        its blocks and their parts get wraps too: parts may be called with merged tokens. With "blocks" alone, each
        transformer's blocks but the first do. `make` takes a class of wraps, the module to wrap and further arguments
        of the class, and returns a wrap.
        """
        yield make(ModelSite, unet)
        before, places = None, self.places
        for place in places:
            level = self.levels[place.halvings]
            if level not in levels:
                continue
            if place.transformer is not before:
                before = place.transformer
                siblings = [other for other in places if other.transformer is before]
                names = {f"{other.path}.attn1" for other in siblings if getattr(other.block, "attn1", None) is not None}
                yield make(TransformerSite, before, level, names)
            kind, parts = AttentionSite, ()
            if "tomesd" in levels[level]:
                kind, parts = BlockAttentionSite, _PARTS
                yield make(BlockSite, place.block, level)
            elif "blocks" in levels[level] and place is not siblings[0]:
                ends = place is siblings[1], place is siblings[-1]
                yield make(MergedBlockSite, place.block, place.path.rpartition(".")[0], level, ends)
            if getattr(place.block, "attn1", None) is not None:
                yield make(kind, place.block.attn1, f"{place.path}.attn1", level, place.halvings)
            for part, name in parts:
                if getattr(place.block, name, None) is not None:
                    yield make(PartSite, getattr(place.block, name), place.path, part, level)

    def pick(self, unet: nn.Module, args: tuple, kwargs: Mapping[str, Any]) -> list[Any]:
        """Return latent and timestep, by place or by known names, None for a missing one. A compiler can trace this."""
        latent = args[0] if args else named(kwargs, LATENTS)
        return [latent, args[1] if len(args) > 1 else named(kwargs, _TIMES)]

    def read(self, unet: nn.Module, given: Mapping[str, Any], time: Any) -> tuple[Any, Any, Any]:
        """Return timestep, latent and facts of a call; `given` holds what `pick` returns by the names in `reads`.

        Timestep and latent are as given. The facts, for ``ModelCall.facts``, are the latent's height and width; None if
        it has fewer than four axes or is no tensor. `time` is not used.
        """
        latent = given["latent"]
        is_picture = torch.is_tensor(latent) and latent.dim() >= 4
        return given["timestep"], latent, latent.shape[-2:] if is_picture else None

    def layout_of(self, call: ModelCall, site: AttentionSite, tokens: int) -> Layout | str:
        """Return the layout of the picture's tokens, or the reason why it is not known or does not fit `tokens`.

        The layout is this level's in ``call.layouts``, which `TransformerSite` has read; without it, as in a compiled
        model, the latent's height and width, halved ``site.halvings`` times and rounded up, are the grid.
        """
        layout = call.layouts.get(site.level)
        if layout is None and call.facts is not None:  # in a compiled model no `TransformerSite` reads the grid
            layout = Layout(Grid(*(-(-side // 2**site.halvings) for side in call.facts)))
        return NO_GRID if layout is None or layout.grid.height * layout.grid.width != tokens else layout


class BlockSite(Wrap):
    """The wrap around a block, which keeps the block's input and plans in ``ModelCall.block`` while its parts run.

    The input is not kept if it is no 3-D tensor or its tokens are not the picture's grid. The wrap replaces the block's
    ``_forward`` if the class has that method, else ``forward``.
    """

    def __init__(self, block: nn.Module, wraps: WrapSet, level: int) -> None:
        # LDM blocks run `_forward` inside their own gradient checkpoint, so only `_forward` runs again in backward
        super().__init__(block, "_forward" if hasattr(type(block), "_forward") else "forward")
        self.wraps, self.level = wraps, level

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Return the block's output; meanwhile ``ModelCall.block``, if there is a call, is what `_input_of` returns."""
        call = self.wraps.calls.current or self.wraps.call_outside_forward()
        x = args[0] if args else named(kwargs, LATENTS)
        if call is None:
            return self.original(*args, **kwargs)
        before, call.block = call.block, self._input_of(call, x)
        try:
            return self.original(*args, **kwargs)
        finally:
            call.block = before

    def _input_of(self, call: ModelCall, x: Any) -> tuple[torch.Tensor, dict] | None:
        """Return the block's input `x` and an empty dict, to be filled with the block's plans by ``id(rule)``.

        None if `x` is no 3-D tensor. If its tokens are not the picture's grid, count the block as unmerged; None too.
        """
        if not torch.is_tensor(x) or x.dim() != 3:
            return None
        layout = call.layouts.get(self.level)
        if layout is None or layout.grid.height * layout.grid.width != x.shape[1]:
            call.state.count_unmerged(self.level, NO_GRID, x.shape[0], x.shape[1], x.shape[1], "block")
            return None
        return x, {}


class MergedBlockSite(Wrap):
    """The wrap around a block that may run on merged tokens: each of a transformer's but the first.

    It replaces the block's ``_forward`` if the class has that method, else ``forward``. `transformer` is the path of
    the list that holds the block; `ends` says whether the block is the first and the last of those.
    """

    def __init__(
        self, block: nn.Module, wraps: WrapSet, transformer: str, level: int, ends: tuple[bool, bool]
    ) -> None:
        super().__init__(block, "_forward" if hasattr(type(block), "_forward") else "forward")
        self.wraps, self.transformer, self.level, self.ends = wraps, transformer, level, ends

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Return the block's output, by `State.run_block` inside a call of the model; outside, it runs unmerged."""
        call = self.wraps.calls.current
        if call is None or (call.rules[self.level].blocks is None and call.merged_tokens is None):
            return self.original(*args, **kwargs)
        layout, why = call.layouts.get(self.level), ""
        if self.ends[0]:
            sites = [site for site in self.wraps.wraps
                     if isinstance(site, MergedBlockSite) and site.transformer == self.transformer]  # fmt: skip
            whys = (why_missed(site) for site in sites if not site.is_on_top())
            why = next(whys, "") or why_not_merged([site.target for site in sites], args[1:], kwargs)
        name = None if args else next((name for name in LATENTS if name in kwargs), None)

        def function(x: torch.Tensor) -> Any:
            return self.original(x, *args[1:], **kwargs) if args else self.original(**{**kwargs, name: x})

        x, grid = args[0] if args else kwargs.get(name), layout and layout.grid
        return call.state.run_block(call, self.transformer, self.level, grid, x, function, *self.ends, why)

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """Call the block unmerged while a compiler traces, return its output, and note this for the report."""
        if self.wraps.patch is not None:
            self.wraps.patch.ledger.note_traced(self.level, PARTS_COMPILED)
        return self.original(*args, **kwargs)


class PartSite(Wrap):
    """The wrap around the part ``attn2`` or ``ff`` of a block, which may merge the input and unmerge the output.

    `block` is the path of the block; `part` is "crossattn" or "mlp".
    """

    def __init__(self, module: nn.Module, wraps: WrapSet, block: str, part: str, level: int) -> None:
        super().__init__(module)
        self.wraps, self.block, self.part, self.level = wraps, block, part, level

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output for all tokens, by `_run_around` if a rule merges the part and `ModelCall.block` is set.

        Otherwise the part is only called, and not counted.
        """
        call = self.wraps.calls.current or self.wraps.call_outside_forward()
        if call is None or call.block is None or getattr(call.rules[self.level], self.part) is None:
            return self.original(*args, **kwargs)
        return _run_around(self, call, self.block, self.part, args, kwargs)

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """Call the part unmerged while a compiler traces, and return its output.

        If a rule of the patch, of any level or ratio, merges such parts, note for the report that compiled ones do not.
        """
        state = self.wraps.patch
        if state is not None and any(getattr(rule, f"merge_{self.part}") for rule in state.clock.rules):
            state.ledger.note_traced(self.level, PARTS_COMPILED)
        return self.original(*args, **kwargs)


class BlockAttentionSite(AttentionSite):
    """The wrap around a self-attention that is called with merged tokens if the rule in force merges tomesd's way.

    With any other rule only keys and values merge, as in `AttentionSite`, which has the same arguments.
    """

    def _merge(self, call: ModelCall, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Return the attention's output: merged as in `AttentionSite` if the rule is not tomesd's.

        If it is tomesd's, `_run_around` answers; without a `ModelCall.block` the attention runs unmerged.
        """
        if not call.rules[self.level].attn.is_as_tomesd:
            return super()._merge(call, args, kwargs)
        if call.block is None:
            return self.original(*args, **kwargs)
        return _run_around(self, call, self.path.removesuffix(".attn1"), "attn", args, kwargs)


def _run_around(site: Any, call: ModelCall, path: str, part: str, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Return the output for all tokens of a part ("attn", "crossattn", "mlp") of the block `path`, merged or not.

    `State.run_part_merged` merges by `ModelCall.block`, which must be set, and unmerges. If it declines, or if
    `_problem_of` gives a reason, which is counted, the part is called as it was: `site` is its wrap.
    """
    (x, plans), level = call.block, site.level
    tokens, context = x.shape[1], args[1] if len(args) > 1 else named(kwargs, CONTEXTS)
    problem, out = _problem_of(part, site.target, x, args, kwargs, context), None
    if problem:
        call.state.count_unmerged(level, problem, x.shape[0], tokens, tokens, part)
    else:
        keys = {"attn": tokens, "mlp": 0}.get(part, context.shape[1] if torch.is_tensor(context) else 0)
        function = partial(_call_merged, site.original, args, kwargs, tokens if part == "attn" else 0)
        out = call.state.run_part_merged(call, path, level, part, call.layouts[level].grid, x, function, plans, keys)
    return site.original(*args, **kwargs) if out is None else out


def _call_merged(original: Callable, args: tuple, kwargs: dict[str, Any], tokens: int, merge: Callable) -> Any:
    """Call a part with merged tokens, and return its output for these; `merge` merges a tensor of all tokens.

    The first argument merges. So does the second, or a context or value by name, if it has `tokens` tokens; 0: none.
    """

    def merged(value: Any) -> Any:
        return merge(value) if torch.is_tensor(value) and value.dim() == 3 and value.shape[1] == tokens else value

    merged_kwargs = {name: merged(value) if name in (*CONTEXTS, "value") else value for name, value in kwargs.items()}
    return original(merge(args[0]), *(merged(value) for value in args[1:2]), *args[2:], **merged_kwargs)


def _problem_of(part: str, module: nn.Module, x: torch.Tensor, args: tuple, kwargs: dict, context: Any) -> str:
    """Return why a part ("attn", "crossattn" or "mlp") of a block cannot be called with merged tokens; "" if it can.

    `x` is the block's input; `context` is the part's own, the tokens of its keys, or None. Reasons: unsupported `args`,
    another batch or number of tokens than `x` has, some masks, a stateful hook; for an "attn", cross-frame attention or
    a `context` of another shape than the part's input.
    """
    if not args or not torch.is_tensor(args[0]) or args[0].dim() != 3 or (part == "attn" and len(args) > 2):
        return ARGUMENTS
    if args[0].shape[:2] != x.shape[:2]:
        return NO_GRID
    masks = [kwargs.get(name) for name in MASKS]
    if part == "attn":
        if any(mask is not None for mask in masks):
            return MASKED
        if kwargs.get("n_times_crossframe_attn_in_self"):  # in sgm, queries also see the keys of other samples
            return "cross-frame attention needs every token"
        if context is not None and not (torch.is_tensor(context) and context.shape == args[0].shape):
            return OF_OTHERS
    if part == "crossattn":
        if any(torch.is_tensor(mask) and mask.dim() > 2 and mask.shape[-2] > 1 for mask in masks):
            return "the call has an attention mask for each query"
        if kwargs.get("ip_adapter_masks") is not None:  # diffusers scales these masks to the number of queries
            return "an adapter's mask needs every token"
    return _stateful_hooks(module)


def why_not_merged(blocks: Sequence[nn.Module], args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Return why blocks cannot run on merged tokens, or "", by the arguments of the first block's call.

    Reasons: patches of attention in ComfyUI's or Forge's transformer_options, a mask of tokens, arguments for
    cross-attention's processors, a processor that is not diffusers', hooks, or another program's method on a block or
    its attentions. All of these may need the picture's grid.
    """
    options = (value for value in (*args, *kwargs.values()) if isinstance(value, dict))
    patches = (name for facts in options for kind in ("patches", "patches_replace") for name in facts.get(kind) or ())
    if any(name.startswith(("attn", "middle_patch")) for name in patches):
        return "a patch of attention may need every token"
    if kwargs.get("attention_mask") is not None:
        return MASKED
    if (kwargs.get("cross_attention_kwargs") or {}).keys() - {"scale", "gligen"}:
        return "an argument for cross-attention may need every token"
    for block in blocks:
        parts = [part for part in (block, getattr(block, "attn1", None), getattr(block, "attn2", None)) if part]
        processor = type(getattr(parts[-1], "processor", None)).__module__.partition(".")[0]
        if processor not in ("builtins", "diffusers"):
            return "cross-attention has a processor of its own, which may need every token"
        if any(part._forward_hooks or part._forward_pre_hooks for part in parts):
            return "a hook of a block or attention may need every token"
        why = next(filter(None, map(_stateful_hooks, parts)), "")
        methods = [method for part in parts if (method := foreign_method_on(part)) and not is_own(part, method)]
        if why or methods:
            return why or f"{REPLACED}: {full_name(methods[0])}"
    return ""


def _stateful_hooks(module: nn.Module) -> str:
    """Return the reason not to merge if the module itself has a stateful hook of diffusers, else "".

    Such a hook, pyramid attention broadcast is one, returns the output of an earlier step, which belongs to another
    match.
    """
    hooks = getattr(getattr(module, "_diffusers_hook", None), "hooks", None) or {}
    names = [type(hook).__name__ for hook in hooks.values() if getattr(hook, "_is_stateful", False)]
    why = "keeps outputs for other steps; if it is put on after the patch, both work"
    return f"{' and '.join(names)} {why}" if names else ""
