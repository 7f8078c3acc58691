"""What wraps a UNet, its transformers and its blocks, and passes on what the blocks' parts need to merge.

The UNet's wrap gives the time, the transformer's the picture's grid, the block's the plan made from its input.
"""

from __future__ import annotations

from operator import index
from typing import Any, NamedTuple

import torch
from torch import nn

from .config import MergeRule
from .gate import pays, pays_in_mlp
from .grid import Grid
from .matching import Matcher
from .methods import METHODS
from .plan import MergePlan
from .probe import WITHOUT, Route
from .runtime import CallMemory, GridCall, MergeMap, Run, is_captured
from .schedule import LevelRules
from .sized import OVERRIDDEN, SizedKeys, brings_its_own_attention
from .wrap import Now, Wrap

_TIME_NAMES = ("timesteps", "timestep", "t")
_INPUT_NAMES = ("hidden_states", "x", "sample")


class Merging(NamedTuple):
    """A plan and how it is used in one part of a block. route: how keys get to know their sizes; None: they do not.

    queries: the plan of self-attention's queries where ``plan`` is of its keys and values alone; None: all are kept.
    """

    plan: MergePlan
    rule: MergeRule
    mode: str
    route: Route | None = None
    queries: MergePlan | None = None


class BlockCall(NamedTuple):
    """One call of a block: what each part merges with (None: it does not), and the shape parts must have."""

    attn: Merging | None
    crossattn: Merging | None
    mlp: Merging | None
    batch: int
    tokens: int


class UNetSite(Wrap):
    """Around the UNet: opens and closes the call, and hands its timestep argument to the run."""

    def __init__(self, unet: nn.Module, run: Run) -> None:
        super().__init__(unet)
        self.run = run

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The UNet's forward, inside a call of the run."""
        if not self.active:
            return self.original(*args, **kwargs)
        if torch.compiler.is_compiling():  # no graph can hold a lock
            return self._call(args, kwargs)
        with self.run.lock:
            return self._call(args, kwargs)

    def _call(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        latent = args[0] if args else named(kwargs, _INPUT_NAMES)
        self.run.begin(args[1] if len(args) > 1 else named(kwargs, _TIME_NAMES), latent)
        try:
            return self.original(*args, **kwargs)
        finally:
            self.run.end()


class TransformerSite(Wrap):
    """Around a transformer: takes the token grid from its 4-D input, anew at each call."""

    def __init__(self, transformer: nn.Module, run: Run) -> None:
        super().__init__(transformer)
        self.run = run
        self.now = Now()  # holds a GridCall
        self.memory = CallMemory()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The transformer's forward, its blocks knowing the grid."""
        x = args[0] if args else named(kwargs, _INPUT_NAMES)
        if not self.active or not torch.is_tensor(x) or x.dim() != 4:
            return self.original(*args, **kwargs)
        call = self.run.call or self.memory.recall(x) or self.run.call_without_time(x)
        self.memory.keep(x, call, self.target.training)
        self.now.call = GridCall(call, index(x.shape[0]), Grid(index(x.shape[2]), index(x.shape[3])))
        try:
            return self.original(*args, **kwargs)
        finally:
            self.now.call = None


class BlockSite(Wrap):
    """Around a block: makes the plans of its parts from the block's input, as tomesd does."""

    def __init__(self, block: nn.Module, transformer: TransformerSite, run: Run, number: int, level: int) -> None:
        # LDM blocks run `_forward` inside their own gradient checkpoint, so only that is seen when it is repeated
        super().__init__(block, "_forward" if hasattr(type(block), "_forward") else "forward")
        self.transformer = transformer
        self.run = run
        self.level = level
        self.matcher = Matcher(block, number, level)
        self.sized: SizedKeys | None = None  # of its self-attention, where a rule asks for it
        self.ran: dict[str, Now] = {}  # part that has a site -> whether this call came by it
        self.now = Now()  # holds a BlockCall
        self.memory = CallMemory()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The block's forward, its parts knowing their plans."""
        x = args[0] if args else named(kwargs, _INPUT_NAMES)
        if not self.active or not torch.is_tensor(x) or x.dim() != 3:
            return self.original(*args, **kwargs)
        outer = self.transformer.now.call or self.memory.recall(x)
        if outer is not None:
            self.memory.keep(x, outer, self.target.training)
            self.now.call = self._open(x, outer, (*args, *kwargs.values()))
        else:
            self._skip(x, "the block was called outside its transformer")
        for part in self.ran.values():
            part.call = None
        try:
            out = self.original(*args, **kwargs)
            self._note_what_was_passed_over()
            return out
        finally:
            self.now.call = None

    def skip_part(self, part: str, reason: str) -> None:
        """A part that should have merged did not."""
        call = self.now.call
        work = call.batch * call.tokens * call.tokens if part == "attn" else 0
        self.run.ledger.skip(self.level, part, reason, work)

    def _note_what_was_passed_over(self) -> None:
        """ComfyUI's block uses an attention's projections alone where a node has put something in its place."""
        call = self.now.call
        if call is None or torch.compiler.is_compiling():
            return
        for part, ran in self.ran.items():
            if getattr(call, part) is not None and ran.call is None:
                self.skip_part(part, "something else runs in its place")

    def _open(self, x: torch.Tensor, outer: GridCall, arguments: tuple) -> BlockCall | None:
        rules = outer.call.rules[self.level]
        if rules.attn is None and rules.crossattn is None and rules.mlp is None:
            return self._skip(x, self.run.why_off[self.level])
        # `index` makes a compiler take sizes as constants, one graph for each: with unknown ones it takes minutes
        outer = GridCall(outer.call, index(outer.batch), Grid(index(outer.grid.height), index(outer.grid.width)))
        tokens = outer.grid.height * outer.grid.width
        if index(x.shape[0]) != outer.batch or index(x.shape[1]) != tokens:
            return self._skip(x, "the tokens are not the picture's grid")
        rules = _that_pay(rules, tokens, index(x.shape[2]), x.device.type)
        if rules.attn is None and rules.crossattn is None and rules.mlp is None:
            return self._skip(x, "so few tokens that merging would not pay")
        # one rule, one match: a block matches once however many of its parts merge
        attn = self._match(x, outer, rules.attn, "attn", self._route(x, rules.attn, arguments))
        crossattn = attn if rules.crossattn is rules.attn else self._match(x, outer, rules.crossattn, "crossattn")
        if rules.mlp is rules.attn:
            mlp = attn
        else:
            mlp = crossattn if rules.mlp is rules.crossattn else self._match(x, outer, rules.mlp, "mlp")
        if attn is None and crossattn is None and mlp is None:
            return self._skip(x, "the grid is too small for the ratio to remove a token")
        if attn is None:
            self.run.ledger.keep(self.level, outer.batch * tokens * tokens)
        self._keep_map(x, outer.grid, attn or crossattn or mlp)
        return BlockCall(attn, crossattn, mlp, outer.batch, tokens)

    def _keep_map(self, x: torch.Tensor, grid: Grid, merging: Merging) -> None:
        """Only where somebody asked to see it: fetching a map waits for the device."""
        if self.run.maps is not None and not torch.compiler.is_compiling() and not is_captured(x):
            plan = merging.plan
            self.run.maps[self.level] = MergeMap(grid, plan.group.cpu(), plan.num_groups)

    def _route(self, x: torch.Tensor, rule: MergeRule | None, arguments: tuple) -> Route | None:
        if rule is None or self.sized is None or not rule.sizes_keys:
            return None
        if brings_its_own_attention(arguments):
            return OVERRIDDEN
        return self.sized.route(x, rule.effective_side == "kv", is_captured(x))

    def _match(
        self, x: torch.Tensor, outer: GridCall, rule: MergeRule | None, part: str, route: Route | None = None
    ) -> Merging | None:
        if rule is None:
            return None
        plans = self.matcher.find(x, outer, rule, part, route is not None and route.kind == WITHOUT)
        if plans.plan is None:
            return None
        return Merging(plans.plan, rule, METHODS[rule.method].mode, route, plans.queries)

    def _skip(self, x: torch.Tensor, reason: str) -> None:
        self.run.ledger.skip(self.level, "block", reason, x.shape[0] * x.shape[1] * x.shape[1])


def _that_pay(rules: LevelRules, tokens: int, channels: int, device: str) -> LevelRules:
    attn, crossattn = (rule if pays(rule, tokens, device) else None for rule in (rules.attn, rules.crossattn))
    return LevelRules(attn, crossattn, rules.mlp if pays_in_mlp(rules.mlp, tokens, channels, device) else None)


def named(kwargs: dict, names: tuple[str, ...]) -> Any:
    """The first of these arguments that was given, or None."""
    return next((kwargs[name] for name in names if name in kwargs), None)
