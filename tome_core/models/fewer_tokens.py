"""The wraps by which blocks of a UNet, and parts of them, get fewer tokens.

`WholeBlockSite` is around a block that may run on merged tokens; such blocks that follow each other are a stretch.
tomesd merges parts of a block instead. Every LDM-style block runs ``x = attn1(norm1(x)) + x``, then the same with
``attn2`` and ``ff``; such a part's tokens merge before it and unmerge after it. `engine.fewer_tokens.around` does both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..attention.descriptions import full_name
from ..engine.decision import BlockInput, ModelCall
from ..engine.fewer_tokens import Merge, Place, around
from ..engine.state import foreign_mode
from ..faults import is_ours
from ..merging.grid import Layout
from ..reporting.ledger import ARGUMENTS, MASKED, NO_GRID, OF_OTHERS, PARTS_COMPILED, REPLACED
from .attention_calls import AttentionCall
from .every_token import TRAINS, ModulesBelow, why_of_arguments
from .outer_wrap import CODE, OuterWrap
from .sites import CONTEXTS, LATENTS, MASKS, AttentionSite, module_at, named
from .weights import of_part, per_token
from .wrap import Wrap, foreign_method_on
from .wrap_set import WrapSet


def _method_of(block: nn.Module) -> str:
    """Return the name of the method to wrap: ``_forward`` if the block's class has that, else ``forward``.

    LDM's blocks run ``_forward`` inside their own gradient checkpoint, so only ``_forward`` runs again in backward.
    """
    return "_forward" if hasattr(type(block), "_forward") else "forward"


class WholeBlockSite(OuterWrap):
    """The wrap around a block that may run on merged tokens; `path` in the model ends with its number in a list.

    `level` is 0 for the finest tokens.
    """

    def __init__(self, block: nn.Module, wraps: WrapSet, path: str, level: int) -> None:
        super().__init__(block, _method_of(block))
        self.wraps, self.level = wraps, level
        self.place = Place(path, level, "block", path.rpartition(".")[0])
        self.below = ModulesBelow(block)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Return the block's output, inside a call of the model by `around`; outside, it runs on all tokens."""
        call, original = self.wraps.calls.current, self.call_code if self.name == CODE else self.original
        if call is None or (call.rules[self.level].block is None and ("block", self.level) not in call.too_wrong):
            return original(*args, **kwargs)
        layout = call.layouts.get(self.level)
        return run_block(call, self.place, layout, self.below, original, args, kwargs)

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """Call the block unmerged while a compiler traces, return its output, and note this for the report."""
        if self.wraps.patch is not None:
            self.wraps.patch.ledger.note_traced(self.level, PARTS_COMPILED)
        return self.original(*args, **kwargs)


def run_block(
    call: ModelCall, place: Place, layout: Layout | None, below: ModulesBelow, original: Callable, args: tuple,
    kwargs: dict[str, Any], why_more: Callable[[], str] = str,
) -> Any:  # fmt: skip
    """Return a block's output, ``original(*args, **kwargs)``, by `around`: on merged tokens if nothing forbids it.

    `place`, `layout` and `call` are arguments of `around`; `below` asks the block's modules. `why_more` returns a
    host's own reason why the block may need every token, "" for none.
    """
    name = None if args else next((name for name in LATENTS if name in kwargs), None)
    x = args[0] if args else kwargs.get(name)

    def run(merge: Merge | None) -> Any:
        if merge is None:
            return original(*args, **kwargs)
        return original(merge(x), *args[1:], **kwargs) if args else original(**{**kwargs, name: merge(x)})

    def why_whole() -> str:
        now = TRAINS if call.has_gradients else foreign_mode() if torch._C._len_torch_function_stack() else ""
        return now or why_of_arguments(args[1:], kwargs) or why_more() or below.why()

    try:
        return around(call, place, x, layout, run, why_whole)
    except Exception as error:
        if not is_ours(error):
            raise
    return original(*args, **kwargs)


class BlockInputSite(Wrap):
    """The wrap around a block whose parts may merge: it keeps the block's input for them while the block runs.

    `level` is 0 for the finest tokens.
    """

    def __init__(self, block: nn.Module, wraps: WrapSet, level: int) -> None:
        super().__init__(block, _method_of(block))
        self.wraps, self.level = wraps, level

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Return the block's output; meanwhile `ModelCall.block`, if there is a call, is what `_input_of` returns."""
        call = self.wraps.calls.current or self.wraps.call_outside_forward()
        if call is None:
            return self.original(*args, **kwargs)
        before, call.block = call.block, NO_GRID
        try:
            call.block = self._input_of(call, args[0] if args else named(kwargs, LATENTS))
        except Exception as error:
            if not is_ours(error):
                raise
        try:
            return self.original(*args, **kwargs)
        finally:
            call.block = before

    def _input_of(self, call: ModelCall, x: Any) -> BlockInput | str:
        """Return the block's input `x`; if it is no 3-D tensor or not the picture's grid, the reason for the parts."""
        if not torch.is_tensor(x) or x.dim() != 3:
            return ARGUMENTS
        layout = call.layouts.get(self.level)
        if layout is None or layout.grid.height * layout.grid.width != x.shape[1]:
            return NO_GRID
        return BlockInput(x, layout.grid, {})

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """Call the block while a compiler traces, and return its output.

        If a rule of the patch merges self-attention tomesd's way, note for the report that compiled blocks do not.
        """
        state = self.wraps.patch
        if state is not None and any(rule.merge_attn and rule.is_as_tomesd for rule in state.clock.rules):
            state.ledger.note_traced(self.level, PARTS_COMPILED)
        return self.original(*args, **kwargs)


class PartSite(Wrap):
    """The wrap around the part ``attn2`` or ``ff`` of a block, which may merge the input and unmerge the output.

    `place` is its path in the model, `part` is "crossattn" or "mlp", `package` the module with the block's class.
    """

    def __init__(self, module: nn.Module, wraps: WrapSet, place: str, level: int, part: str, package: str) -> None:
        super().__init__(module)
        self.wraps, (block, _, name) = wraps, place.rpartition(".")
        self.place = Place(block, level, part, weights=of_part(module))
        self.below = ModulesBelow(module, name, package)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output for all tokens, by `_run_part` if a rule merges the part.

        Otherwise the part is only called, and not counted.
        """
        call, level, part = self.wraps.calls.current or self.wraps.call_outside_forward(), *self.place[1:3]
        if call is None or getattr(call.rules[level], part) is None:
            return self.original(*args, **kwargs)
        try:
            return _run_part(self, call, args, kwargs)
        except Exception as error:
            if not is_ours(error):
                raise
        return self.original(*args, **kwargs)

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """Call the part unmerged while a compiler traces, and return its output.

        If a rule of the patch, of any level or ratio, merges such parts, note for the report that compiled ones do not.
        """
        state, (_, level, part, *_) = self.wraps.patch, self.place
        if state is not None and any(getattr(rule, f"merge_{part}") for rule in state.clock.rules):
            state.ledger.note_traced(level, PARTS_COMPILED)
        return self.original(*args, **kwargs)


class BlockAttentionSite(AttentionSite):
    """The wrap around a self-attention that is called with merged tokens if the rule in force merges tomesd's way.

    With any other rule only keys and values merge, as in `AttentionSite`, which has the same arguments but for
    `package`, the module with the block's class.
    """

    def __init__(
        self, module: nn.Module, wraps: WrapSet, path: str, level: int, halvings: int = 0, package: str = ""
    ) -> None:
        super().__init__(module, wraps, path, level, halvings)
        block, _, name = path.rpartition(".")
        self.place = Place(block, level, "attn", weights=per_token(module))
        self.below = ModulesBelow(module, name, package)

    def _merge(self, call: ModelCall, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Return the attention's output: by `_run_part` if the rule is tomesd's, else merged as in `AttentionSite`."""
        if not call.rules[self.level].attn.is_as_tomesd:
            return super()._merge(call, args, kwargs)
        return _run_part(self, call, args, kwargs)

    def _answer_in_graph(self, call: ModelCall, attention_call: AttentionCall) -> torch.Tensor:
        """Return the attention's output as in `AttentionSite`, but unmerged, and counted, if the rule is tomesd's.

        The operator of a graph gets queries, keys and values, while tomesd's way is to merge what they are made of.
        """
        rule, (batch, tokens) = call.rules[self.level].attn, attention_call.q.shape[:2]
        if rule is None or not rule.is_as_tomesd:
            return super()._answer_in_graph(call, attention_call)
        call.state.count_unmerged(self.level, PARTS_COMPILED, batch, tokens)
        return attention_call.unmerged()


def _run_part(site: PartSite | BlockAttentionSite, call: ModelCall, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Return the output of a part for all tokens, by `around`: it merges by `ModelCall.block`.

    Without that input of its block it runs on all tokens, and the reason is counted.
    """
    block, part = call.block, site.place.part
    if not isinstance(block, BlockInput):
        x = args[0] if args else named(kwargs, LATENTS)
        batch, tokens = x.shape[:2] if torch.is_tensor(x) and x.dim() > 1 else (0, 0)
        call.state.count_unmerged(site.place.level, block or _why_no_input(site, call), batch, tokens, part)
        return site.original(*args, **kwargs)
    tokens, context = block.x.shape[1], args[1] if len(args) > 1 else named(kwargs, CONTEXTS)
    keys = context.shape[1] if part == "crossattn" and torch.is_tensor(context) else 0

    def run(merge: Merge | None) -> Any:
        if merge is None:
            return site.original(*args, **kwargs)
        return _call_merged(site.original, args, kwargs, tokens if part == "attn" else 0, merge)

    def why_whole() -> str:
        return _why_of_part(part, block.x, args, kwargs, context) or foreign_mode() or site.below.why()

    return around(call, site.place, block.x, Layout(block.grid), run, why_whole, keys)


def _why_no_input(site: PartSite | BlockAttentionSite, call: ModelCall) -> str:
    """Return why the wrap around a part's block was not called: a compiler, or another program's method."""
    if PARTS_COMPILED in call.state.ledger.levels[site.place.level].traced:
        return PARTS_COMPILED
    block = module_at(site.wraps.wraps[0].target, site.place.name)
    methods = (foreign_method_on(block, name) for name in ("forward", "_forward") if hasattr(type(block), name))
    method = next(filter(None, methods), None)
    return REPLACED if method is None else f"{REPLACED}: {full_name(method)}"


def _call_merged(original: Callable, args: tuple, kwargs: dict[str, Any], tokens: int, merge: Merge) -> Any:
    """Call a part with merged tokens, and return its output for these; `merge` merges a tensor of all tokens.

    The first argument merges. So does the second, or a context or value by name, if it has `tokens` tokens; 0: none.
    """

    def merged(value: Any) -> Any:
        return merge(value) if torch.is_tensor(value) and value.dim() == 3 and value.shape[1] == tokens else value

    merged_kwargs = {name: merged(value) if name in (*CONTEXTS, "value") else value for name, value in kwargs.items()}
    return original(merge(args[0]), *(merged(value) for value in args[1:2]), *args[2:], **merged_kwargs)


def _why_of_part(part: str, x: torch.Tensor, args: tuple, kwargs: dict[str, Any], context: Any) -> str:
    """Return why a call of a part ("attn", "crossattn" or "mlp") of a block needs every token; "" if it does not.

    `x` is the block's input; `context` is the part's own, the tokens of its keys, or None. Reasons: unsupported `args`,
    another batch or number of tokens than `x` has, some masks; for an "attn", cross-frame attention or a `context` of
    another shape than the part's input.
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
            return "the prompt has a mask that differs over the picture"
        if kwargs.get("ip_adapter_masks") is not None:  # diffusers scales these masks to the number of queries
            return "an adapter's mask needs every token"
    return ""
