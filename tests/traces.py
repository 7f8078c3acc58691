"""What a patch has put on a model, and what it could leave behind."""

from __future__ import annotations

from typing import Any

from tome_core.model.switch import Switch, switch_of
from tome_core.model.wrap import Wrap
from tome_core.unet.wiring import wiring_of


def traces(model) -> list:
    """All that a patch could leave on a model: its modules, their classes, attributes and hooks, state-dict keys.

    Equal ones before and after mean that it left nothing.
    """
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_forward_hooks_with_kwargs")
    return [
        (name, type(module), sorted(vars(module)), [len(vars(module).get(hook, ())) for hook in hooks])
        for name, module in model.named_modules()
    ] + sorted(model.state_dict())


def wraps_of(handle: Any) -> list[Wrap]:
    """All wraps that are on the UNet that the handle patched, and those it put on a pipeline."""
    wiring = wiring_of(handle.unet)
    return [*(wrap for wrap in (wiring._wraps.values() if wiring else ()) if wrap.active), *handle._outside]


def is_idle(unet: Any) -> bool:
    """Does nothing that belongs to the UNet hold anything of a call, and does nobody wait for its end?"""
    switch: Switch = switch_of(unet)
    return (switch.call, switch.grid, switch.block, switch.later, switch.named) == (None, None, None, [], [])
