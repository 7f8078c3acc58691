"""Hooks of diffusers that stand in for a part's ``forward``: which of them give one step what another returned."""

from __future__ import annotations

from torch import nn


def kept_by_a_hook(module: nn.Module) -> str:
    """Why the module's ``forward`` may not get merged tokens; "" where no hook stands in the way.

    A hook that says it has a state (pyramid attention broadcast does) answers with the output of an earlier step. Of
    merged tokens that would be another match's.
    """
    hooks = getattr(getattr(module, "_diffusers_hook", None), "hooks", None) or {}
    names = [type(hook).__name__ for hook in hooks.values() if getattr(hook, "_is_stateful", False)]
    if not names:
        return ""
    return f"{' and '.join(names)} keeps outputs for other steps; put on after merging, both work"
