"""ComfyUI's slot for a function that replaces its attention, and the attention calls that arrive there."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from .host import hosting

SLOT = "optimized_attention_override"  # in transformer_options since September 2025; gets ComfyUI's function first
# ComfyUI's functions that must not get a bias, though they accept a mask. attention_flash leaves the call to torch with
# a warning. attention_sub_quad, if memory is short, takes the maximum before it adds the mask: it may belong to a
# group without tokens, and then all other weights become 0.
_UNBIASED = frozenset({"attention_flash", "attention_sub_quad"})
_ALIKE = 0.02  # the largest relative difference of answers in two orders: half precision and less round


class OtherNodesFunction(NamedTuple):
    """A callable with the arguments of ComfyUI's attention; calls `override`, another node's function in the slot."""

    override: Callable
    function: Callable  # ComfyUI's, the first argument of `override`

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the attention's output."""
        return self.override(self.function, *args, **kwargs)


class HostCall(hosting.HeadsCall):
    """One call of a ComfyUI attention function, or of an `OtherNodesFunction`."""

    def takes_bias(self) -> bool | None:
        """Tell whether a bias is added to the logits; not by one of `_UNBIASED`. None: it computes no attention."""
        takes = super().takes_bias()
        return takes and not any(getattr(part, "__name__", "") in _UNBIASED for part in _parts(self._function))

    @property
    def override(self) -> Callable | None:
        """Another node's function in the slot, which computes this call; None if there is none."""
        return self._function.override if type(self._function) is OtherNodesFunction else None

    def treats_tokens_alike(self) -> bool:
        """Try whether queries in another order give the same answers in that order. A self-attention's keys go along.

        A function that looks at the picture's grid fails. It is called twice more, which one with a memory sees.
        """
        q, k, v = self.q, self.k, self.v
        # by fractions of the golden ratio's multiples, so no two neighbours stay together
        order = (torch.arange(q.shape[1], dtype=torch.float32, device="cpu") * 0.618034).frac().argsort().to(q.device)
        moved = (k[:, order], v[:, order]) if k.shape[:2] == q.shape[:2] else (k, v)
        expected, out = self.compute(q, k, v, None)[:, order], self.compute(q[:, order], *moved, None)
        return bool((out - expected).norm() <= _ALIKE * expected.norm())


def other_names_in_slot(options: dict[str, Any]) -> str:
    """Return full names, with spaces between, of the function in transformer_options' `SLOT` and of its closure's."""
    parts = _parts(OtherNodesFunction(options.get(SLOT), None))
    return " ".join(hosting.full_name(part) for part in parts if callable(part))


def why_of_patches(options: dict[str, Any]) -> str:
    """Return why a self-attention has other tokens than the picture's, if transformer_options have patches, else ""."""
    names = names_of_patches(options, "attn1_patch")
    return f"another node's patch changed the tokens{names}" if names else ""


def names_of_patches(options: dict[str, Any], kind: str) -> str:
    """Return `` (name, name)`` of the patches in transformer_options whose kind begins with this; "" without any."""
    kinds = [patches for name, patches in (options.get("patches") or {}).items() if name.startswith(kind)]
    names = dict.fromkeys(hosting.name_of_patch(patch) for patches in kinds for patch in patches)
    return f" ({', '.join(names)})" if names else ""


def _parts(function: Any) -> tuple[Any, ...]:
    """Return the function; of an `OtherNodesFunction` its two functions and the values in the override's closure."""
    if not isinstance(function, OtherNodesFunction):
        return (function,)
    held = (cell.cell_contents for cell in getattr(function.override, "__closure__", None) or ())
    return (*function, *held)
