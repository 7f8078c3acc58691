"""What a patch could leave behind on a model, as one value: equal ones before and after mean that it left nothing."""

from __future__ import annotations


def traces(model) -> list:
    """All that a patch could leave on a model: its modules, their classes, attributes and hooks, state-dict keys."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_forward_hooks_with_kwargs")
    return [
        (name, type(module), sorted(vars(module)), [len(vars(module).get(hook, ())) for hook in hooks])
        for name, module in model.named_modules()
    ] + sorted(model.state_dict())
