"""Blocks of a UNet whose parts are called with merged tokens: tomesd's way, for `apply_patch` and its settings.

Every LDM-style block runs ``x = attn1(norm1(x)) + x``, then the same with ``attn2`` and ``ff``. Merging before such a
part and unmerging after it needs no line of the block, so whatever hooks it from outside goes on seeing all tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from ..engine.decision import is_as_tomesd
from ..merging.grid import Grid
from ..reporting.reasons import MASKED, NO_GRID, OF_OTHERS
from .sites import AttentionSite, ModelCall, Shared, named
from .wrap import Wrap

_NAMES = ("hidden_states", "x")
_MASKS = ("mask", "attention_mask", "attn_mask")
_IN_GRAPH = "its parts merge by a rule that compiled blocks do not follow"
_UNKNOWN_CALL = "called in an unknown way"


class BlockCall(NamedTuple):
    """One call of a block. x: its input ``[B, N, C]``. plans: of its parts, by rule."""

    now: ModelCall
    path: str
    grid: Grid
    x: torch.Tensor
    plans: dict


class BlockSite(Wrap):
    """Around a block: holds its input while its parts run."""

    def __init__(self, block: nn.Module, path: str, level: int, shared: Shared) -> None:
        # LDM blocks run `_forward` inside their own gradient checkpoint, so only that is seen when it is repeated
        super().__init__(block, "_forward" if hasattr(type(block), "_forward") else "forward")
        self.path, self.level, self.shared = path, level, shared

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """The block's output, its parts able to merge."""
        calls, x = self.shared.calls, args[0] if args else named(kwargs, _NAMES)
        now = calls.now or self.shared.resumed()
        before, calls.block = calls.block, None if now is None else self._open(now, x)
        try:
            return self.original(*args, **kwargs)
        finally:
            calls.block = before

    def _open(self, now: ModelCall, x: Any) -> BlockCall | None:
        if not torch.is_tensor(x) or x.dim() != 3:
            return None
        grid = now.grid or now.grids.get(self.level)
        if grid is None or grid.height * grid.width != x.shape[1]:
            now.state.leave_alone(now.call, self.level, NO_GRID, x.shape[0], x.shape[1], x.shape[1], "block")
            return None
        return BlockCall(now, self.path, grid, x, {})


class PartSite(Wrap):
    """Around ``attn2`` or ``ff``: merges its input, unmerges its output. part: "crossattn" or "mlp"."""

    def __init__(self, module: nn.Module, path: str, part: str, level: int, shared: Shared) -> None:
        super().__init__(module)
        self.path, self.part, self.level, self.shared = path, part, level, shared

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """What the part gives."""
        block = self.shared.calls.block
        if block is None or getattr(block.now.call.rules[self.level], self.part) is None:
            return self.original(*args, **kwargs)
        problem = _problem_of(self.part, self.target, block, args, kwargs)
        out = _run_around(self, block, self.part, args, kwargs, problem)
        return self.original(*args, **kwargs) if out is None else out

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """In a graph nothing merges here."""
        state = self.shared.state
        if state is not None and any(getattr(rule, f"merge_{self.part}") for rule in state.clock.rules):
            state.ledger.note_traced(self.level, _IN_GRAPH)
        return self.original(*args, **kwargs)


class BlockAttentionSite(AttentionSite):
    """A self-attention of such a block: tomesd's way if the rule in force is tomesd's, else as every other."""

    merges_around = True

    def _merge(self, now: ModelCall, args: tuple, kwargs: dict[str, Any]) -> Any:
        rule, block = now.call.rules[self.level].attn, self.shared.calls.block
        if not is_as_tomesd(rule):
            return super()._merge(now, args, kwargs)
        if block is None:
            return self.original(*args, **kwargs)
        problem = _problem_of("attn", self.target, block, args, kwargs)
        context = args[1] if len(args) > 1 else named(kwargs, ("encoder_hidden_states", "context"))
        if not problem and context is not None and context is not args[0]:
            problem = "" if torch.is_tensor(context) and context.shape == args[0].shape else OF_OTHERS
        out = _run_around(self, block, "attn", args, kwargs, problem)
        return self.original(*args, **kwargs) if out is None else out


def _run_around(
    site: Any, block: BlockCall, part: str, args: tuple, kwargs: dict[str, Any], problem: str
) -> torch.Tensor | None:
    now, x = block.now, block.x
    if problem:
        now.state.leave_alone(now.call, site.level, problem, x.shape[0], x.shape[1], x.shape[1], part)
        return None
    tokens = x.shape[1]
    context = args[1] if len(args) > 1 else named(kwargs, ("encoder_hidden_states", "context"))
    keys = {"attn": tokens, "mlp": 0}.get(part, context.shape[1] if torch.is_tensor(context) else 0)
    function = partial(_call_merged, site.original, args, kwargs, tokens if part == "attn" else 0)
    return now.state.around(
        now.call, block.path, site.level, part, block.grid, x, function, block.plans, keys
    )


def _call_merged(
    original: Callable, args: tuple, kwargs: dict[str, Any], tokens: int, merge: Callable[[torch.Tensor], torch.Tensor]
) -> Any:
    """The part on merged tokens. tokens: of contexts and values that merge as well; 0 for none."""

    def merged(one: Any) -> Any:
        return merge(one) if torch.is_tensor(one) and one.dim() == 3 and one.shape[1] == tokens else one

    more = {name: merged(one) if name in ("encoder_hidden_states", "context", "value") else one
            for name, one in kwargs.items()}  # fmt: skip
    return original(merge(args[0]), *(merged(one) for one in args[1:2]), *args[2:], **more)


def _problem_of(part: str, module: nn.Module, block: BlockCall, args: tuple, kwargs: dict[str, Any]) -> str:
    """Why a part cannot be called with merged tokens; "" if it can."""
    if not args or not torch.is_tensor(args[0]) or args[0].dim() != 3 or (part == "attn" and len(args) > 2):
        return _UNKNOWN_CALL
    if args[0].shape[:2] != block.x.shape[:2]:
        return NO_GRID
    masks = [kwargs.get(name) for name in _MASKS]
    if part == "attn":
        if any(mask is not None for mask in masks):
            return MASKED
        if kwargs.get("n_times_crossframe_attn_in_self"):  # sgm: keys of some samples serve others
            return "cross-frame attention needs every token"
    if part == "crossattn":
        if any(torch.is_tensor(mask) and mask.dim() > 2 and mask.shape[-2] > 1 for mask in masks):
            return "an attention mask for single tokens came along"
        if kwargs.get("ip_adapter_masks") is not None:  # cut to the number of queries as if they were a picture
            return "an adapter's mask needs every token"
    return _kept_by_a_hook(module)


def _kept_by_a_hook(module: nn.Module) -> str:
    """Why the module's ``forward`` may not get merged tokens: a hook of diffusers' with a state (as pyramid attention
    broadcast's) answers with the output of an earlier step, which would be another match's. "" if there is none.
    """
    hooks = getattr(getattr(module, "_diffusers_hook", None), "hooks", None) or {}
    names = [type(hook).__name__ for hook in hooks.values() if getattr(hook, "_is_stateful", False)]
    return f"{' and '.join(names)} keeps outputs for other steps; put on after merging, both work" if names else ""
