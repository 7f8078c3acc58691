"""What a recorded call depends on and no argument shows: the modules, their weights, and what lies on them."""

from __future__ import annotations

import operator
from itertools import chain

import torch
import torch.nn.functional as F
from torch import nn

from ..model.families import is_compiled
from ..model.wrap import is_wrapped_by_others

COMPILED = 'it is compiled, and torch.compile(mode="reduce-overhead") records graphs by itself'
_OFFLOADED = (
    "accelerate moves its weights (offload, a device map), and a graph reads where they were; keep them on the card"
)
WRAPPED = "somebody's wrapper lies on it, and a graph would freeze its decisions; capture first, wrap then"
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


class ModelState:
    """A model as it is now, to be compared at every call. problem: why its calls cannot be recorded, "" where they can.

    What wraps the model itself does not count, it may lie above a capture. What was looked at is held, so that nothing
    else comes to lie at an address that a graph reads.
    """

    def __init__(self, model: nn.Module) -> None:
        modules = list(model.modules())
        self.problem = _problem(model, modules)
        self._registers = [one for module in modules for one in (module._parameters, module._buffers)]
        self._tensors = self._tensors_now()
        self._addresses = _addresses(self._tensors)
        # adapters' strengths, hooks and submodules lie in containers that are changed in place
        inside = [one for module in modules for name, one in vars(module).items()
                  if isinstance(one, (dict, list, set)) and name not in ("_parameters", "_buffers")]  # fmt: skip
        self._empty = [one for one in inside if not one]
        self._containers = [*map(vars, modules), *(one for one in inside if one)]
        self._contents = list(map(_copy, self._containers))
        self._attention = F.scaled_dot_product_attention

    def holds(self) -> bool:
        """Is it still so? Asked without waiting for the device."""
        tensors = self._tensors_now()
        if len(tensors) != len(self._tensors) or not all(map(operator.is_, tensors, self._tensors)):
            return False
        if _addresses(tensors) != self._addresses or F.scaled_dot_product_attention is not self._attention:
            return False
        try:
            return not any(self._empty) and self._containers == self._contents
        except Exception:  # tensors, arrays and their like that were exchanged have no one truth value
            return False

    def _tensors_now(self) -> list[torch.Tensor | None]:
        return [*chain.from_iterable(one.values() for one in self._registers)]


def _copy(container: dict | list | set) -> dict | list | set:
    return next(kind(container) for kind in (dict, list, set) if isinstance(container, kind))


def _addresses(tensors: list[torch.Tensor | None]) -> list[int]:
    return [0 if one is None else one.data_ptr() for one in tensors]


def _problem(model: nn.Module, modules: list[nn.Module]) -> str:
    if any(hasattr(one, "_hf_hook") for one in modules):
        return _OFFLOADED
    if is_compiled(model):
        return COMPILED
    for one in modules:
        if one is not model and is_wrapped_by_others(one):
            return f"somebody's wrapper lies on a {type(one).__name__} in it, and a graph would freeze its decisions"
        if any(getattr(one, name) for name in _HOOKS):
            return f"somebody's hook lies on a {type(one).__name__} in it, and a graph would not call it"
    return ""
