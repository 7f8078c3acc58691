"""What wraps a UNet's transformers and their blocks, and passes on what the blocks' parts need to merge.

The transformer's wrap knows the picture's grid and what is decided for it. The block's holds its input; its parts find
plans from that, or from the keys and values that their attention makes of it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from operator import index
from typing import Any

import torch
from torch import nn

from ..attention import known_of
from ..attention.core import Whole
from ..compiling import compiles_here
from ..merging.grid import Grid
from ..model.switch import Switch, inside
from ..model.wrap import Wrap
from ..reporting.reasons import NO_GRID, REPLACED
from ..running.call import Call, GridCall, skip
from ..running.decision import Merging
from ..running.matching import Asked, Matcher
from ..running.operators import NumberedSite
from ..running.search import Plans
from ..running.tensors import is_captured, is_transformed
from ..settings.rule import MergeRule, rule_of
from . import in_graph
from .compiled import answer, ask, may_ask
from .root import UNetSite, input_of, named_input

PARTS = ("attn", "crossattn", "mlp")


class BlockCall:
    """One call of a block. x: its input ``[B, N, C]``; plans: found so far; ran: the parts that were called."""

    def __init__(self, site: BlockSite, x: torch.Tensor, outer: GridCall) -> None:
        self.site = site
        self.x = x
        self.outer = outer
        self.plans: dict[Any, Plans] = {}
        self.ran: set[str] = set()

    def plans_for(self, merging: Merging, part: str, together: bool = False, whole: Whole | None = None) -> Plans:
        """The plans of a part; together, whole: as `Asked` has them.

        One rule, one match: a block matches once however many of its parts merge by it.
        """
        if part != "attn":
            part = self._first_with(merging.rule, part)
        key = (part, together)
        plans = self.plans.get(key)
        if plans is None:
            # what its self-attention found serves the other parts, whatever way that took
            plans = self.plans.get((part, True))
            if plans is None:
                plans = self._find(Asked(self.site.target, self.x, self.outer, merging.rule, part, together, whole))
            self.plans[key] = plans
        return plans

    def _find(self, asked: Asked) -> Plans:
        site, call = self.site, asked.outer.call
        if not (torch.compiler.is_compiling() and compiles_here()) or not may_ask(asked):
            return site.matcher.find(asked)
        stamp = call.stamp if asked.rule.use_rand and torch.is_tensor(call.stamp) else None
        return ask(asked, site.number, stamp)

    def _first_with(self, rule: MergeRule, part: str) -> str:
        """The first part that merges by this very rule."""
        for first in PARTS:
            merging = getattr(self.outer.decision, first)
            if first == part or (merging is not None and merging.rule is rule):
                return first
        return part


class CallMemory:
    """Which call a tensor belonged to, for gradient checkpointing.

    A checkpoint runs a block again during the backward pass, when the UNet's call is over, and others may have been.
    The block's input is kept alive until then, so its address tells which call it was. calls: by it, the latest last.
    """

    LIMIT = 4096

    def __init__(self) -> None:
        self.calls: OrderedDict[int, Any] = OrderedDict()

    def keep(self, x: torch.Tensor, call: Any) -> None:
        """Remember the call of ``x``, unless no backward pass can follow."""
        if torch.is_inference_mode_enabled() or is_transformed(x):
            return
        self.calls[x.data_ptr()] = call
        self.calls.move_to_end(x.data_ptr())
        if len(self.calls) > self.LIMIT:
            self.calls.popitem(last=False)

    def forget(self, x: Any) -> None:
        """What lies there now is of no call, whatever lay at its address before."""
        if type(x) is torch.Tensor and not is_transformed(x):
            self.calls.pop(x.data_ptr(), None)

    def recall(self, x: Any) -> Any | None:
        """The call of ``x``, or None."""
        if not self.calls or type(x) is not torch.Tensor or is_transformed(x):
            return None
        return self.calls.get(x.data_ptr())

    def __getstate__(self) -> dict[str, Any]:
        return {"calls": OrderedDict()}  # addresses mean nothing to a copy


class RememberingSite(Wrap):
    """Remembers its calls for a checkpoint, which runs it again when they are over."""

    def __init__(self, target: nn.Module, name: str = "forward") -> None:
        super().__init__(target, name)
        self.memory = CallMemory()

    def recall(self, x: Any) -> Any | None:
        """The call that a checkpoint runs again on ``x``; None inside a call that merges nothing, which is not over."""
        if not inside.plain:
            return self.memory.recall(x)
        self.memory.forget(x)
        return None

    def uninstall(self) -> None:
        """As `Wrap.uninstall`, and forgets its calls."""
        super().uninstall()
        self.memory.calls.clear()


class TransformerSite(RememberingSite):
    """Around a transformer: takes the token grid from its 4-D input, anew at each call, and asks what is decided.

    level: of its blocks; blocks: how many it has; channels: of their tokens.
    """

    def __init__(self, transformer: nn.Module, switch: Switch, level: int, blocks: int, channels: int) -> None:
        super().__init__(transformer)
        self.switch = switch
        self.level = level
        self.blocks = blocks
        self.channels = channels

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The transformer's forward, its blocks knowing the grid where they are to merge."""
        switch = self.switch
        call = switch.call
        x = args[0] if args else named_input(kwargs)
        if call is None and self.memory.calls:
            call = in_this_thread(self.recall(x))
        if call is None or not self.active or not torch.is_tensor(x) or x.dim() != 4:
            return self.original(*args, **kwargs)
        compiling = torch.compiler.is_compiling() and compiles_here()
        if not compiling and call.thread != threading.get_ident():
            return self.original(*args, **kwargs)
        if not compiling and (self.target.training or torch.is_grad_enabled() or x.requires_grad):
            self.memory.keep(x, call)
        before, grid = switch.grid, self._open(call, x, compiling)
        if grid is before:  # nothing merges in here, as around it
            return self.original(*args, **kwargs)
        switch.grid = grid
        try:
            if compiling:
                return self.original(*args, **kwargs)
            return (self.beneath or getattr(type(self.target), self.name).__get__(self.target))(*args, **kwargs)
        finally:
            switch.grid = before

    def _open(self, call: Call, x: torch.Tensor, compiling: bool) -> GridCall | None:
        batch, _, height, width = x.shape
        if compiling:  # sizes as constants, one graph for each: with unknown ones a compiler takes minutes
            batch, height, width = index(batch), index(height), index(width)
        tokens, level, run = height * width, self.level, call.run
        key = () if compiling else (id(call.rules[level]), call.why_off[level], tokens, self.channels, x.device)
        decision = None if compiling else run.decisions.get(key)
        if decision is None:
            decision = run.decide(key, call, level, tokens, self.channels, x.device.type)
        if decision.why_not and (compiling or self.beneath is None):
            run.ledger.skip(call, level, "block", decision.why_not, batch * tokens * tokens, self.blocks)
            return None
        # somebody who stands below may skip blocks, so those that are left alone count themselves
        return GridCall(call, batch, Grid(height, width), decision)


class BlockSite(NumberedSite, RememberingSite):
    """Around a block: holds its input while its parts run."""

    operators = in_graph.OPERATORS

    def __init__(self, block: nn.Module, root: UNetSite, place: int, level: int) -> None:
        """place: the block's number among all of the UNet."""
        # LDM blocks run `_forward` inside their own gradient checkpoint, so only that is seen when it is repeated
        super().__init__(block, "_forward" if hasattr(type(block), "_forward") else "forward")
        self.switch = root.switch
        self.root = root
        self.level = level
        self.matcher = Matcher(place, level)
        self.parts: list[str] = []  # that have a wrap

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The block's forward, its parts able to merge."""
        switch = self.switch
        outer = switch.grid
        if not self.active or (outer is None and (switch.call is not None or not self.memory.calls)):
            if self.active and not (torch.compiler.is_compiling() and compiles_here()):
                if switch.call is not None and self.memory.calls:
                    self.memory.forget(input_of(args, kwargs))
                elif switch.call is None and switch.run is not None:
                    self.root.look_after_itself(self.level)
            return self.original(*args, **kwargs)
        x = args[0] if args else named_input(kwargs)
        if not torch.is_tensor(x) or x.dim() != 3:
            return self.original(*args, **kwargs)
        if outer is None:  # a checkpoint runs it again
            outer = self.recall(x)
            outer = outer and outer._replace(call=in_this_thread(outer.call))
        compiling = torch.compiler.is_compiling() and compiles_here()
        if outer is None or not (compiling or outer.call.thread == threading.get_ident()):
            return self.original(*args, **kwargs)
        if not compiling and (self.target.training or torch.is_grad_enabled() or x.requires_grad):
            self.memory.keep(x, outer)
        before, switch.block = switch.block, self._open(x, outer)
        block = switch.block
        try:
            if compiling:
                return self.original(*args, **kwargs)
            out = (self.beneath or getattr(type(self.target), self.name).__get__(self.target))(*args, **kwargs)
            if block is not None and len(block.ran) < len(self.parts):
                self._note_what_was_passed_over(block)
            return out
        finally:
            switch.block = before

    def _open(self, x: torch.Tensor, outer: GridCall) -> BlockCall | None:
        batch, tokens, _ = x.shape
        if torch.compiler.is_compiling() and compiles_here():
            batch, tokens = index(batch), index(tokens)
        call, work = outer.call, batch * tokens * tokens
        fits = batch == outer.batch and tokens == outer.grid.height * outer.grid.width
        if why := outer.decision.why_not if fits else NO_GRID:
            call.run.ledger.skip(call, self.level, "block", why, work)
            return None
        if outer.decision.attn is None:
            call.run.ledger.count_unmerged(call, self.level, work)
        return BlockCall(self, x, outer)

    def answers(
        self, x: torch.Tensor, stamp: torch.Tensor | None, whole: list[torch.Tensor], match_text: str, part: str,
        together: bool, height: int, width: int,
    ) -> list[torch.Tensor]:  # fmt: skip
        """What a compiled graph asks for in its call; see `in_graph.OPERATORS`."""
        switch, rule, thread = self.switch, rule_of(match_text), threading.get_ident()
        outer = switch.grid  # where this block alone is compiled
        if outer is None:
            call = switch.call
            if call is None:  # the whole UNet is
                run = switch.current()
                call = Call(run, thread, stamp, (), (), None if run is None else run.kept_in_graph)
            outer = GridCall(call, x.shape[0], Grid(height, width), None)
        if outer.call.thread != thread or is_captured(x):
            outer = outer._replace(call=outer.call._replace(kept=None))
        of_attention = None
        if whole:
            attention = self.target.attn1
            x_of, keys, values, *q = whole
            of_attention = Whole(known_of(attention), attention, x_of, keys, values, {}, q[0] if q else None)
        asked = Asked(self.target, x, outer, rule, part, together, of_attention)
        return answer(self.matcher.find(asked), x.shape[0])

    def _note_what_was_passed_over(self, block: BlockCall) -> None:
        """ComfyUI's block uses an attention's projections alone where a node has put something in its place."""
        outer = block.outer
        for part in self.parts:
            if getattr(outer.decision, part) is not None and part not in block.ran:
                skip(outer, self.level, part, REPLACED)


def in_this_thread(call: Call | None) -> Call | None:
    """A call that is looked at again: a backward pass on a GPU runs in a thread of its own."""
    return call and call._replace(thread=threading.get_ident())
