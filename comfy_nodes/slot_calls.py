"""ComfyUI's slot for a function that replaces its attention, and the attention calls that arrive there.

ComfyUI calls ``transformer_options["optimized_attention_override"]`` in place of its attention function, which is the
first argument. If another node has put a function there, ours calls it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from .host import hosting

SLOT = "optimized_attention_override"  # since September 2025
# ComfyUI's functions that must not get a bias, though they accept a mask. attention_flash leaves the call to torch with
# a warning. attention_sub_quad, if memory is short, takes the maximum before it adds the mask: it may belong to a
# group without tokens, and then all other weights become 0.
_UNBIASED = frozenset({"attention_flash", "attention_sub_quad"})


class OtherNodesCall(NamedTuple):
    """A call of another node's function in the slot.

    Args:
        override: the other node's function.
        function: ComfyUI's attention function, its first argument.
    """

    override: Callable
    function: Callable

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Compute the attention as the other node does."""
        return self.override(self.function, *args, **kwargs)


class HostCall(hosting.HeadsCall):
    """One call of a ComfyUI attention function."""

    def takes_bias(self) -> bool | None:
        """Tell whether the function accepts a bias, see the base class."""
        takes = super().takes_bias()
        return takes and not any(getattr(part, "__name__", "") in _UNBIASED for part in _parts(self._function))


def other_names_in_slot(options: dict[str, Any]) -> str:
    """Return the names of another node's functions in the slot, because they change how long a call takes."""
    parts = _parts(OtherNodesCall(options.get(SLOT), None))
    return " ".join(hosting.full_name(part) for part in parts if callable(part))


def _parts(function: Any) -> tuple[Any, ...]:
    """Return all functions that may compute a call: another node's, those in its closure, and ComfyUI's."""
    if not isinstance(function, OtherNodesCall):
        return (function,)
    held = (cell.cell_contents for cell in getattr(function.override, "__closure__", None) or ())
    return (*function, *held)
