"""The slot that ComfyUI's attentions ask, and the calls that come to it.

``transformer_options["optimized_attention_override"]`` is called in the place of ComfyUI's attention function, with
that function. What another node has put there is called by ours.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from .host import hosting

SLOT = "optimized_attention_override"  # since September 2025
# ComfyUI's functions that get no bias, though they seem to add one. Flash attention leaves it to torch, and warns at
# each call. attention_sub_quad, short of memory, takes the maximum first and adds then: a group without tokens may hold
# the maximum, and all others vanish.
_UNBIASED = frozenset({"attention_flash", "attention_sub_quad"})


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


def name_in_force(options: dict[str, Any]) -> str:
    """What another node has put into the slot: it changes how long a call takes."""
    return " ".join(hosting.full_name(one) for one in _parts(Through(options.get(SLOT), None)) if callable(one))


def _parts(function: Any) -> tuple[Any, ...]:
    """Functions that may answer a call: one by itself, or a node's, ComfyUI's, and what the node's has chosen."""
    if not isinstance(function, Through):
        return (function,)
    held = (cell.cell_contents for cell in getattr(function.override, "__closure__", None) or ())
    return (*function, *held)
