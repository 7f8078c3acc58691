"""Wrappers that others leave in place of a method when they switch them off, and what is seen through them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from .wrap import without_inert

_WRAPPERS: dict[str, Callable[[nn.Module, Any], Any]] = {}


def register_wrapper(name: str, beneath: Callable[[nn.Module, Any], Any]) -> None:
    """Make somebody's wrappers known.

    beneath: of a module and what stands in place of its ``forward``: what that does nothing but call at this moment;
    None where it does more, or is another's. A second one of a name replaces the first.
    """
    _WRAPPERS[name] = beneath


def is_own(module: nn.Module, method: Any) -> bool:
    """Does the method, in place of the module's ``forward``, come down to the class's? None stands for the class's."""
    while method is not None:
        if getattr(method, "__self__", None) is module:
            return getattr(method, "__func__", None) is type(module).forward
        found = (beneath(module, method) for beneath in _WRAPPERS.values())
        method = next((one for one in found if one is not None), None)
        if method is None:
            return False
        method = without_inert(method)  # of ours, which they may have found when they came
    return True
