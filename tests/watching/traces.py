"""All that a patch puts on a model, and all that it could leave behind."""

from typing import Any

from tome_core.models import intercept
from tome_core.models.wrap import Wrap
from tome_core.models.wrap_set import wraps_on


def traces(model) -> list:
    """All that a patch could leave on a model: its modules, their classes, attributes and hooks, state-dict keys."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_forward_hooks_with_kwargs")
    return [(name, type(module), sorted(vars(module)), [len(vars(module).get(hook, ())) for hook in hooks])
            for name, module in model.named_modules()] + sorted(model.state_dict())  # fmt: skip


def attributes(model) -> dict[str, dict]:
    return {path: dict(vars(module)) for path, module in model.named_modules()}


def wraps_of(handle: Any) -> list[Wrap]:
    """All wraps that are on the models that the handle patched, and those it put on a pipeline."""
    sets = (wraps_on(model) for model in handle._present())
    return [*(wrap for wrapped in sets if wrapped is not None for wrap in wrapped.wraps), *handle._pipeline_wraps]


def is_idle(handle: Any) -> bool:
    """Do the model and this thread hold nothing of a call?"""
    if intercept.current.answer is not None:
        return False
    calls = (wrapped.calls for wrapped in map(wraps_on, handle._present()) if wrapped is not None)
    return all((wrapped.current, wrapped.in_graph, wrapped.disabled) == (None, None, 0) for wrapped in calls)


def drop_own_methods(model) -> None:
    """Remove methods of the class from instances; programs that restore a method leave them there."""
    for module in model.modules():
        for name in ("forward", "_forward"):
            if getattr(vars(module).get(name), "__self__", None) is module:
                delattr(module, name)
