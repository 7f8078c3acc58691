"""The parts of a block where merging happens.

Every LDM-style block runs ``x = attn1(norm1(x)) + x``, then the same with ``attn2`` and ``ff``. Merging before such a
part and unmerging after it needs no line of the block, so whatever hooks it from outside goes on seeing all tokens.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import nn

from ..attention import KnownAttention, LeftAlone, known_of, name_of
from ..attention.core import UNSIZED, Whole, attend_merged
from ..compiling import compiles_here, when_traced
from ..merging.plan import MergePlan
from ..model.families import UNetFamily
from ..model.idle import is_own
from ..model.wrap import Wrap
from ..reporting.reasons import MASKED, NO_GRID, TOO_SMALL
from ..running.call import skip
from ..running.decision import Merging
from ..running.tensors import is_captured
from .sites import BlockCall, BlockSite

_MASK_NAMES = ("mask", "attention_mask", "attn_mask")
TOGETHER = "q, k, v together"
_UNKNOWN_CALL = "called in an unknown way"
_OF_OTHERS = "keys and values are not the picture's tokens"


class PartSite(Wrap):
    """Around a part of a block: merge its input, unmerge its output."""

    part = ""

    def __init__(self, module: nn.Module, block: BlockSite) -> None:
        super().__init__(module)
        self.switch = block.switch
        self.level = block.level
        self.block = block

    def install(self) -> Wrap:
        """As `Wrap.install`. The block then expects this part to be called."""
        wrap = super().install()
        if self.part not in self.block.parts:
            self.block.parts.append(self.part)
        return wrap

    def uninstall(self) -> None:
        """As `Wrap.uninstall`. The block then no longer expects this part to be called."""
        super().uninstall()
        if self.part in self.block.parts:
            self.block.parts.remove(self.part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The part's forward on merged tokens, or untouched where merging does not fit the call."""
        block = self.switch.block
        if block is None or not self.active:
            return self.original(*args, **kwargs)
        call = block.outer.call
        if not (torch.compiler.is_compiling() and compiles_here()) and call.thread != threading.get_ident():
            return self.original(*args, **kwargs)
        block.ran.add(self.part)
        merging = getattr(block.outer.decision, self.part)
        if merging is None:
            return self.original(*args, **kwargs)
        problem = "" if self.beneath is None else _kept_by_a_hook(self.target)
        problem = problem or self._problem(block, args, kwargs)
        if not problem:
            problem = self._merge(block, merging, *args, **kwargs)
            if not isinstance(problem, str):
                return problem
        skip(block.outer, self.level, self.part, problem)
        return self.original(*args, **kwargs)

    def _problem(self, block: BlockCall, args: tuple, kwargs: dict) -> str | None:
        if not args or not torch.is_tensor(args[0]) or args[0].dim() != 3:
            return _UNKNOWN_CALL
        if args[0].shape[:2] != block.x.shape[:2]:
            return NO_GRID
        return None

    def _merge(
        self, block: BlockCall, merging: Merging, x: torch.Tensor, *args: Any, _keys: int = 0, **kwargs: Any
    ) -> Any | str:
        """The part's output for merged input; why it was left alone where that cannot be. _keys: how many."""
        plan = block.plans_for(merging, self.part).plan
        if plan is None:
            return TOO_SMALL
        out = self.original(plan.merge(x, merging.mode), *args, **kwargs)
        return self._finish(block, plan, x, out, (plan.num_groups, _keys), _keys)

    def _finish(
        self, block: BlockCall, plan: MergePlan | None, x: torch.Tensor, out: Any, left: tuple[int, int], keys: int,
        route: str = "",
    ) -> Any | str:  # fmt: skip
        """The output for every token. plan: that of the queries, None where all were kept; left: queries, keys."""
        queries = left[0]
        if plan is not None and queries != x.shape[1]:
            if not torch.is_tensor(out) or out.dim() != 3 or out.shape[:2] != (x.shape[0], queries):
                return "what it returned cannot be unmerged"
            out = plan.unmerge(out)
        call = block.outer.call
        run = call.run
        run.ledger.merge(call, self.level, self.part, (x.shape[0], x.shape[1], keys), left, route)
        shown = run.maps is not None and block.plans
        if shown and not (torch.compiler.is_compiling() and compiles_here()) and not is_captured(x):
            run.maps[self.level] = block.outer.grid, next(iter(block.plans.values())).plan
        return out


def _kept_by_a_hook(module: nn.Module) -> str:
    """Why the module's ``forward`` may not get merged tokens: a hook of diffusers' with a state (as pyramid attention
    broadcast's) answers with the output of an earlier step, which would be another match's. "" where there is none.
    """
    hooks = getattr(getattr(module, "_diffusers_hook", None), "hooks", None) or {}
    names = [type(hook).__name__ for hook in hooks.values() if getattr(hook, "_is_stateful", False)]
    return f"{' and '.join(names)} keeps outputs for other steps; put on after merging, both work" if names else ""


_NO_MEMORY = (MemoryError, torch.cuda.OutOfMemoryError)


class FeedForwardSite(PartSite):
    """Around ``ff``."""

    part = "mlp"


class CrossAttentionSite(PartSite):
    """Around ``attn2``: only the queries are the picture's tokens. A mask over the prompt stays what it is."""

    part = "crossattn"

    def _problem(self, block: BlockCall, args: tuple, kwargs: dict) -> str | None:
        masks = (kwargs.get(name) for name in _MASK_NAMES)
        if any(torch.is_tensor(mask) and mask.dim() > 2 and mask.shape[-2] > 1 for mask in masks):
            return "an attention mask for single tokens came along"
        if kwargs.get("ip_adapter_masks") is not None:  # cut to the number of queries as if they were a picture
            return "an adapter's mask needs every token"
        return super()._problem(block, args, kwargs)


class SelfAttentionSite(PartSite):
    """Around ``attn1``: keys and values merged inside of a known attention; q, k and v together around any other."""

    part = "attn"

    def __init__(self, module: nn.Module, block: BlockSite, family: UNetFamily) -> None:
        super().__init__(module, block)
        self.family = family
        self._known: KnownAttention | LeftAlone | None = None  # in the graph that is being made
        self._refused: tuple[Any, int] | None = None  # processor and tokens that it was of no use to match for

    def install(self) -> Wrap:
        """As `PartSite.install`. Blocks of one kind then look alike to a compiler, which makes one graph for them."""
        wrap = super().install()
        wrap._describe()
        return wrap

    def _describe(self) -> KnownAttention | LeftAlone | None:
        """What is known of the attention beneath, at this moment."""
        if not (torch.compiler.is_compiling() and compiles_here()):
            self._known = known_of(self.target) if self.beneath is None or is_own(self.target, self.beneath) else None
            return self._known
        # looked at so that another kind of processor makes another graph
        if type(getattr(self.target, "processor", None)) is not SelfAttentionSite:
            self._describe_when_traced()
        return self._known

    @when_traced
    def _describe_when_traced(self) -> int:
        """For a compiler, which cannot follow the question; nor does it see an idle wrapper begin to work."""
        self._known = known_of(self.target) if self.beneath is None else None
        return 0

    def _problem(self, block: BlockCall, args: tuple, kwargs: dict) -> str | None:
        # the base's questions again: this is asked in every block, and a call less is worth it
        if not args or len(args) > 2 or not torch.is_tensor(args[0]) or args[0].dim() != 3:
            return _UNKNOWN_CALL
        if args[0].shape[:2] != block.x.shape[:2]:
            return NO_GRID
        for name in _MASK_NAMES:
            if kwargs.get(name) is not None:
                return MASKED
        if kwargs.get("n_times_crossframe_attn_in_self"):  # sgm: keys of some samples serve others
            return "cross-frame attention needs every token"
        return None

    def _merge(self, block: BlockCall, merging: Merging, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any | str:
        name = self.family.context
        context = args[0] if args else kwargs.pop(name, None)
        if context is not None and not torch.is_tensor(context):  # diffusers: a prompt, and images beside it
            return _OF_OTHERS
        if context is not None and context is not x and not _is_self(block.site.target, x, context):
            if merging.side == "kv":
                return _OF_OTHERS
            # queries alone can merge, as in the attention to the prompt
            return super()._merge(block, merging, x, _keys=context.shape[1], **{**kwargs, name: context})
        value = kwargs.pop("value", None)
        if value is not None and value.shape[:2] != x.shape[:2]:
            return "keys and values are of different numbers"
        known = self._describe()
        if isinstance(known, LeftAlone):
            return f"{name_of(self.target)} {known.why}"
        if merging.side == "qkv" and not merging.proportional:
            return self._together(block, merging, x, context, value, kwargs, "")
        if known is None:
            return self._together(block, merging, x, context, value, kwargs, f"{name_of(self.target)} is not known")
        problem = known.problem(self.target, kwargs)
        if problem:
            return self._together(block, merging, x, context, value, kwargs, problem)
        return self._inside(known, block, merging, x, context, value, kwargs)

    def _inside(
        self, known: KnownAttention, block: BlockCall, merging: Merging, x: torch.Tensor,
        context: torch.Tensor | None, value: torch.Tensor | None, kwargs: dict,
    ) -> Any | str:  # fmt: skip
        """By the attention's own projections and function, merged in between."""
        source = x if context is None else context
        value = source if value is None else value
        side, mode, target = merging.side, merging.mode, self.target
        whole = q = None
        if merging.corrected:
            q = known.queries(target, x, kwargs) if side == "kv" else None
            whole = Whole(known, target, x, source, value, kwargs, q)
        plan, of_queries, correction, merged = block.plans_for(merging, self.part, whole=whole)
        if plan is None:
            return TOO_SMALL
        queries = of_queries if side == "kv" else plan
        asked = x if queries is None else queries.merge(x, mode)
        keys, values = source, value
        if merged is None:
            keys = asked if queries is plan and source is x else plan.merge(source, mode)
            values = keys if value is source else plan.merge(value, mode)
        sizes = plan if merging.proportional else None
        out, way = attend_merged(known, target, asked, keys, values, sizes, kwargs, correction, q, merged)
        left = (asked.shape[1], plan.num_groups)
        return self._finish(block, queries, x, out, left, x.shape[1], way if merging.proportional else "")

    def _together(
        self, block: BlockCall, merging: Merging, x: torch.Tensor, context: torch.Tensor | None,
        value: torch.Tensor | None, kwargs: dict, why: str,
    ) -> Any | str:  # fmt: skip
        """tomesd's way: one call on merged tokens, whatever lies inside. why: it is not known; "": it was asked for."""
        asked = getattr(self.target, "processor", None), x.shape[1]
        if asked[0] is not None and self._refused == asked:
            return f"{name_of(self.target)} refuses merged tokens"
        plan = block.plans_for(merging, self.part, together=bool(why)).plan
        if plan is None:
            return TOO_SMALL
        merged = plan.merge(x)
        for name, given in ((self.family.context, context), ("value", value)):
            if given is not None:
                kwargs[name] = merged if given is x else plan.merge(given)
        try:
            out = self.original(merged, **kwargs)
        except Exception as error:
            if (torch.compiler.is_compiling() and compiles_here()) or isinstance(error, _NO_MEMORY):
                raise
            if not torch.is_grad_enabled():  # a recomputation has to do what its forward did, so it tries again
                self._refused = asked
            return f"{name_of(self.target)} refuses merged tokens"
        route = f"{TOGETHER}, {UNSIZED}, because {why}" if why else ""
        return self._finish(block, plan, x, out, (plan.num_groups, plan.num_groups), x.shape[1], route)


def _is_self(block: nn.Module, x: torch.Tensor, context: torch.Tensor) -> bool:
    """Do keys and values come from the picture's tokens? ComfyUI passes them along even then."""
    if getattr(block, "disable_self_attn", False) or getattr(block, "only_cross_attention", False):
        return False
    return context.shape[:2] == x.shape[:2]
