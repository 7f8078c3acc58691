"""Keys that know how many tokens they stand for: which way each self-attention takes that, asked once and kept."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .families import Family
from .fold import ProjectionWraps
from .probe import FOLDED, MASK, OUT_OF_MEMORY, WITHOUT, Route, Trial, find_route

_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
NOT_ASKED = Route(WITHOUT, "it could not be tried out before it was compiled")
_CHANGED = Route(WITHOUT, "its projections were changed before it was compiled")
_SILENT = Route(WITHOUT, "trying it out told nothing")
_NO_MEMORY = Route(WITHOUT, "there was no memory to try it out")
OVERRIDDEN = Route(WITHOUT, "the call brings an attention of its own")
_MASKED = Route(MASK, masked=True)
# Products of queries and keys up to which a mask is taken where wider heads fit as well. It adds no kernel to a block
# whose match is kept, wider heads add four, but flash kernels know no masks.
# cpu: measured, SDPA, batch 2, 8 heads of 40 channels, 4,096 queries, float32: 47 ms against 68 at 256 keys, 167
# against 198 at 1,024; bfloat16 at 256 keys 47 against 52.
# others: estimated; a call of this size waits for launches on a fast GPU.
_MASKED_UP_TO = {"cpu": math.inf}
_MASKED_UP_TO_ELSEWHERE = 4096 * 1024


class Routes:
    """The routes found so far, by what they depend on: attentions of one kind ask once."""

    def __init__(self) -> None:
        self.found: dict[tuple, Route] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {"found": {}}  # a copy's modules are others, and not every key can be pickled


class SizedKeys:
    """The route of one self-attention. One object for a site and its copies.

    beneath, call: of the site in force, set by it: what lies under our wrap, and how that is called.
    """

    def __init__(self, attention: nn.Module, family: Family, routes: Routes) -> None:
        self.attention = attention
        self.family = family
        self.routes = routes
        self.wraps = ProjectionWraps(attention)
        self.settled = NOT_ASKED
        self.beneath: Any = None
        self.call: Callable[..., Any] | None = None

    def install(self, beneath: Any, call: Callable[..., Any], sides: set[bool]) -> None:
        """Wrap the projections and, where the weights are there already, ask; sides: of rules, True for kv."""
        self.beneath, self.call = beneath, call
        self.wraps.install()
        weight = next(self.attention.parameters(), None)
        if weight is None or weight.is_meta or weight.dtype not in _FLOATS:
            return
        for alone in sides:
            self.settled = self._ask(weight.device, weight.dtype, alone) or self.settled

    def uninstall(self) -> None:
        """Take the wraps of the projections off."""
        self.wraps.uninstall()

    def route(self, x: torch.Tensor, alone: bool, captured: bool = False) -> Route:
        """The way this call takes. x: the block's input; alone: keys are merged without the queries.

        While a compiler traces, or a CUDA graph records, nothing can be tried out: what was found before holds.
        """
        if torch.compiler.is_compiling():
            if self.settled.kind != FOLDED or self.wraps.are_in_force():
                return self.settled
            return _MASKED if self.settled.masked else _CHANGED
        if not self.wraps.are_in_force():
            self.wraps.install()
        weight = next(self.attention.parameters(), x)
        dtype = weight.dtype if weight.dtype in _FLOATS else x.dtype
        if captured:
            return self.routes.found.get(self._kind(x.device, dtype, alone), NOT_ASKED)
        self.settled = self._ask(x.device, dtype, alone) or self._give_up(x.device, dtype, alone)
        return self.settled

    def _ask(self, device: torch.device, dtype: torch.dtype, alone: bool) -> Route | None:
        key = self._kind(device, dtype, alone)
        route = self.routes.found.get(key)
        if route is None:
            trial = Trial(self.attention, self.call, self.family, self.wraps, alone)
            try:
                route = find_route(trial, device, dtype)
            except OUT_OF_MEMORY:  # asked again at the next call
                return _NO_MEMORY
            if route is not None:
                self.routes.found[key] = route
        return route

    def _give_up(self, device: torch.device, dtype: torch.dtype, alone: bool) -> Route:
        self.routes.found[self._kind(device, dtype, alone)] = _SILENT
        return _SILENT

    def _kind(self, device: torch.device, dtype: torch.dtype, alone: bool) -> tuple:
        """All that a route depends on."""
        attention = self.attention
        q, k = getattr(attention, "to_q", None), getattr(attention, "to_k", None)
        return (
            getattr(type(attention), "forward", None), id(self.beneath), type(getattr(attention, "processor", None)),
            getattr(attention, "fused_projections", False), type(getattr(attention, "norm_q", None)),
            type(q), getattr(q, "in_features", 0), getattr(q, "out_features", 0), type(k), getattr(k, "in_features", 0),
            getattr(attention, "heads", 0), getattr(attention, "scale", 0), device, dtype, alone,
        )  # fmt: skip


def for_size(route: Route, queries: int, keys: int, device: str) -> Route:
    """The cheaper way for so many queries and keys on a device of this type, where the attention takes several."""
    few = queries * keys <= _MASKED_UP_TO.get(device, _MASKED_UP_TO_ELSEWHERE)
    return _MASKED if route.masked and few else route


def brings_its_own_attention(arguments: Any) -> bool:
    """Does a call of the block bring another attention along? ComfyUI 0.3.60 and newer let a node do that."""
    name = "optimized_attention_override"
    return any(isinstance(one, dict) and one.get(name) is not None for one in arguments)
