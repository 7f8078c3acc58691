"""The slot that ComfyUI's attentions ask, filled for one call of the model.

``transformer_options["optimized_attention_override"]`` is called in the place of ComfyUI's attention function, with
that function. What another node has put there is called by ours.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from .host import hosting

SLOT = "optimized_attention_override"  # since September 2025
_BENEATH = "tome_beneath"  # of a function of ours: what was in the slot before
# globals by which ComfyUI's attentions find their function
_NAMES = ("optimized_attention", "optimized_attention_masked")
# ComfyUI's functions that get no bias, though they seem to add one. Flash attention leaves it to torch, and warns at
# each call. attention_sub_quad, short of memory, takes the maximum first and adds then: a group without tokens may hold
# the maximum, and all others vanish.
_UNBIASED = frozenset({"attention_flash", "attention_sub_quad"})

Ask = Callable[["HostCall", dict[str, Any]], torch.Tensor]  # a call, and its transformer_options


class Through(NamedTuple):
    """Another node's function from the slot, and the function of ComfyUI's that it is given."""

    override: Callable
    function: Callable

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.override(self.function, *args, **kwargs)


class HostCall(hosting.ByHeads):
    """One call of an attention function of ComfyUI's."""

    def takes_bias(self) -> bool | None:
        """As of every call."""
        found = super().takes_bias()
        return found and not any(getattr(one, "__name__", "") in _UNBIASED for one in _parts(self._function))


def fill(options: dict[str, Any], ask: Ask) -> dict[str, Any]:
    """The transformer_options of a call of the model, with a function in the slot that answers what ``ask`` does."""
    beneath = options.get(SLOT)
    beneath = getattr(beneath, _BENEATH, beneath)  # the model is called again inside its own call

    def attention(function, q, k, v, heads, *args, **kwargs):
        own = function if beneath is None else Through(beneath, function)
        return ask(HostCall(own, q, k, v, heads, *args, **kwargs), kwargs.get("transformer_options") or options)

    setattr(attention, _BENEATH, beneath)
    return {**options, SLOT: attention}


def tell(options: dict[str, Any]) -> dict[str, Any]:
    """What of a call's transformer_options decides its attention, as a keyword of the model's forward."""
    return {"transformer_options": {SLOT: options[SLOT]}} if SLOT in options else {}


def name_in_force(function: Any, options: dict[str, Any]) -> str:
    """What tells the attention of a model's calls from all others. function: of ComfyUI's."""
    own = Through(options[SLOT], function) if SLOT in options else function
    return " ".join(hosting.full_name(one) for one in _parts(own) if callable(one))


def _parts(function: Any) -> tuple[Any, ...]:
    """Functions that may answer a call: one by itself, or a node's, ComfyUI's, and what the node's has chosen."""
    if not isinstance(function, Through):
        return (function,)
    held = (cell.cell_contents for cell in getattr(function.override, "__closure__", None) or ())
    return (*function, *held)


def _by_name(function: Callable, *args: Any, **kwargs: Any) -> HostCall:
    """A call of the function behind a global name, which would ask the slot."""
    override = (kwargs.get("transformer_options") or {}).get(SLOT)
    if override is None:
        return HostCall(function, *args, **kwargs)
    return HostCall(Through(override, function), *args, _inside_attn_wrapper=True, **kwargs)


def register() -> None:
    """Make the names of ComfyUI's functions known to the engine, for what it measures."""
    for name in _NAMES:
        hosting.register_name(name, _by_name)
