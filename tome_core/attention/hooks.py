"""Hooks of diffusers that stand in for a part's ``forward``: which of them give one step what another returned."""

from __future__ import annotations

from torch import nn


def kept_by_a_hook(module: nn.Module) -> str:
    """Why the module's ``forward`` may not get merged tokens: a hook with a state (as pyramid attention broadcast's)
    answers with the output of an earlier step, which would be another match's. "" where there is none.
    """
    hooks = getattr(getattr(module, "_diffusers_hook", None), "hooks", None) or {}
    names = [type(hook).__name__ for hook in hooks.values() if getattr(hook, "_is_stateful", False)]
    if not names:
        return ""
    return f"{' and '.join(names)} keeps outputs for other steps; put on after merging, both work"
