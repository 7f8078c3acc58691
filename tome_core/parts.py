"""The parts of a block where merging happens.

The line of every LDM-style block is ``x = attn1(norm1(x)) + x``, then the same with ``attn2`` and ``ff``.
Merging before such a part and unmerging after it needs no line of the block itself, so everything that hooks
the block from outside goes on seeing all tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .families import Family
from .plan import MergePlan
from .probe import FOLDED, MASK, WITHOUT, Route, folding_of, key_mask, padded
from .sites import BlockSite, Merging
from .sized import SizedKeys, for_size
from .wrap import Now, Wrap

_PLAIN = Route(WITHOUT)
_MORE_KEYS = Route(WITHOUT, "additional tokens came along")
_MASK_NAMES = ("mask", "attention_mask", "attn_mask")


class PartSite(Wrap):
    """Around a part of a block: merge its input, unmerge its output."""

    part = ""

    def __init__(self, module: nn.Module, block: BlockSite) -> None:
        super().__init__(module)
        self.block = block
        self.ran = block.ran[self.part] = Now()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The part's forward on merged tokens, or untouched where merging does not fit the call."""
        merging = self._merging() if self.active else None
        if merging is None:
            return self.original(*args, **kwargs)
        self.ran.call = True
        problem = self._problem(args, kwargs)
        if not problem:
            out = self._merged(merging, *args, **kwargs)
            if out is not None:
                return out
            problem = "what it returned cannot be unmerged"
        self.block.skip_part(self.part, problem)
        return self.original(*args, **kwargs)

    def _merging(self) -> Merging | None:
        call = self.block.now.call
        return None if call is None else getattr(call, self.part)

    def _problem(self, args: tuple, kwargs: dict) -> str | None:
        call = self.block.now.call
        if not args or not torch.is_tensor(args[0]) or args[0].dim() != 3:
            return "called in an unknown way"
        if args[0].shape[0] != call.batch or args[0].shape[1] != call.tokens:
            return "the tokens are not the picture's grid"
        return None

    def _merged(self, merging: Merging, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any | None:
        """The part's output for merged input; None where that cannot be unmerged."""
        out = self.original(merging.plan.merge(x, merging.mode), *args, **kwargs)
        return self._finish(merging.plan, x, out, (merging.plan.num_groups, 0), 0)

    def _finish(
        self, plan: MergePlan | None, x: torch.Tensor, out: Any, left: tuple[int, int], keys: int
    ) -> Any | None:
        """The output for every token. plan: that of the queries, None where all were kept; left: queries, keys."""
        queries = left[0]
        if plan is not None and queries != x.shape[1]:
            if not torch.is_tensor(out) or out.dim() != 3 or out.shape[:2] != (x.shape[0], queries):
                return None
            out = plan.unmerge(out)
        self.block.run.ledger.merge(self.block.level, self.part, (x.shape[0], x.shape[1], keys), left)
        return out


class FeedForwardSite(PartSite):
    """Around ``ff``."""

    part = "mlp"


class CrossAttentionSite(PartSite):
    """Around ``attn2``: only the queries are the picture's tokens. A mask over the prompt stays what it is."""

    part = "crossattn"

    def _problem(self, args: tuple, kwargs: dict) -> str | None:
        masks = (kwargs.get(name) for name in _MASK_NAMES)
        if any(torch.is_tensor(mask) and mask.dim() > 2 and mask.shape[-2] > 1 for mask in masks):
            return "an attention mask for single tokens came along"
        if kwargs.get("ip_adapter_masks") is not None:  # cut to the number of queries as if they were a picture
            return "an adapter's mask needs every token"
        return super()._problem(args, kwargs)


class SelfAttentionSite(PartSite):
    """Around ``attn1``: merges query, key and value with one plan, or only the sides the rule names."""

    part = "attn"

    def __init__(
        self, module: nn.Module, block: BlockSite, family: Family, sized: SizedKeys | None = None
    ) -> None:
        super().__init__(module, block)
        self.family = family
        self.sized = block.sized = sized

    def install(self) -> Wrap:
        """As of every wrap; the projections are wrapped as well where keys are to know their sizes."""
        wrap = super().install()
        if self.sized is not None:
            sides = {rule.effective_side == "kv" for rule in self.block.run.in_order if rule.sizes_keys}
            self.sized.install(wrap.beneath, wrap.original, sides)
        return wrap

    def uninstall(self) -> None:
        """Take all of it off."""
        if self.sized is not None:
            self.sized.uninstall()
        super().uninstall()

    def _problem(self, args: tuple, kwargs: dict) -> str | None:
        if len(args) > 2:
            return "called in an unknown way"
        if any(kwargs.get(name) is not None for name in _MASK_NAMES):
            return "an attention mask came along"
        if kwargs.get("n_times_crossframe_attn_in_self"):  # sgm: keys of some samples serve others
            return "cross-frame attention needs every token"
        return super()._problem(args, kwargs) or self._side_problem(args, kwargs)

    def _side_problem(self, args: tuple, kwargs: dict) -> str | None:
        side = self._merging().rule.effective_side
        value = kwargs.get("value")
        if value is not None and side != "q" and self._is_self(args, kwargs) and value.shape[:2] != args[0].shape[:2]:
            return "keys and values are of different numbers"
        if kwargs.get("additional_tokens") is not None and self._merging().rule.refine:
            return "additional tokens came along, and groups may be empty"
        if side == "qkv":
            return None
        if kwargs.get("additional_tokens") is not None:  # sgm adds them to x, and to keys only where they are x
            return "additional tokens cannot be kept in one side alone"
        if side == "kv" and not self._is_self(args, kwargs):
            return "keys and values are not the picture's tokens"
        # diffusers' fused projections make q, k and v from one input and offer nothing else
        fused = getattr(self.target, "fused_projections", False)
        return "fused projections cannot merge one side alone" if fused else None

    def _is_self(self, args: tuple, kwargs: dict) -> bool:
        """Do keys and values come from the picture's tokens? ComfyUI passes them along even then."""
        context = args[1] if len(args) > 1 else kwargs.get(self.family.context)
        if context is None or context is args[0]:
            return True
        block = self.block.target
        if getattr(block, "disable_self_attn", False) or getattr(block, "only_cross_attention", False):
            return False
        return context.shape[:2] == args[0].shape[:2]

    def _merged(self, merging: Merging, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any | None:
        own = self._is_self((x, *args), kwargs)
        side = merging.rule.effective_side if own else "q"
        tokens = x.shape[1]
        if args:
            kwargs = {self.family.context: args[0], **kwargs}
        context = kwargs.get(self.family.context)
        merged = merging.plan.merge(x, merging.mode)
        queries = merging.queries if side == "kv" else merging.plan
        asked = x if queries is None else merged if queries is merging.plan else queries.merge(x)
        route = self._route(merging, side, asked, kwargs)
        if side == "q":
            kwargs[self.family.context] = x if context is None else context
        else:
            self._merge_keys(merging, x, merged, kwargs, explicit=side == "kv" or route.padded)
        out = self._attend(merging.plan, route, asked, kwargs)
        keys = tokens if own else context.shape[1]
        left = (asked.shape[1], keys if side == "q" else merging.plan.num_groups)
        return self._finish(queries, x, out, left, keys)

    def _route(self, merging: Merging, side: str, asked: torch.Tensor, kwargs: dict) -> Route:
        if side == "q" or merging.route is None:
            return _PLAIN
        route = for_size(merging.route, asked.shape[1], merging.plan.num_groups, asked.device.type)
        if kwargs.get("additional_tokens") is not None:  # sgm puts them among the keys
            route = _MORE_KEYS
        self.block.run.ledger.route(self.block.level, route.kind, route.why)
        return route

    def _attend(self, plan: MergePlan, route: Route, x: torch.Tensor, kwargs: dict) -> Any:
        if route.kind == MASK:
            kwargs[self.family.mask] = key_mask(plan, x)
        if route.kind != FOLDED:
            return self.original(x, **kwargs)
        now = self.sized.wraps.now
        now.call = folding_of(route, plan)
        try:
            return self.original(padded(x, route), **kwargs)
        finally:
            now.call = None

    def _merge_keys(
        self, merging: Merging, x: torch.Tensor, merged: torch.Tensor, kwargs: dict, explicit: bool
    ) -> None:
        for name in (self.family.context, "value"):
            given = kwargs.get(name)
            if given is not None:
                kwargs[name] = merged if given is x else merging.plan.merge(given, merging.mode)
        if explicit and kwargs.get(self.family.context) is None:
            kwargs[self.family.context] = merged
