"""Other people's replacements of `forward`: put wherever a patch stands, and put back as they do it."""

from __future__ import annotations

from typing import Any

from torch import nn

from tome_core.models import adapter_of, find_models
from tome_core.models.unet import BlockSite


class Foreign:
    """Replaces a module's method the way accelerate and ControlNet do: save what is there, call it, put it back."""

    def __init__(self, module, name="forward"):
        self.module, self.name, self.calls = module, name, 0
        self.saved = getattr(module, name)
        setattr(module, name, self._call)

    def _call(self, *args, **kwargs):
        self.calls += 1
        return self.saved(*args, **kwargs)

    def put_back(self):
        """accelerate and ControlNet put the saved method onto the instance even if it was the class's."""
        setattr(self.module, self.name, self.saved)


def sites_of(model) -> list[tuple[nn.Module, str]]:
    """All that a patch may wrap, and so what others may wrap as well: module and name of the method."""
    found: list[tuple[nn.Module, str]] = []
    for one in find_models(model):
        adapter = adapter_of(one)
        levels = set(range(len(adapter.downsamples)))
        found += adapter.wraps(one, levels, levels, _site)
    return found


def _site(kind: type, module: nn.Module, *_: Any) -> tuple[nn.Module, str]:
    return module, "_forward" if kind is BlockSite and hasattr(module, "_forward") else "forward"


def wrap_everything(model) -> list[Foreign]:
    """Replace all that a patch wraps, or would wrap."""
    return [Foreign(*site) for site in sites_of(model)]


def unwrap(foreign: list[Foreign]) -> None:
    """Put everything back, the last one first."""
    for one in reversed(foreign):
        one.put_back()
