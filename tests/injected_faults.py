"""Errors, interrupts and full memory, raised once at a place where a patch stands."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.thoroughness import some_quick
from tests.traces import wraps_of
from tome_core.models.sites import AttentionSite

ERRORS = (RuntimeError, KeyboardInterrupt, torch.cuda.OutOfMemoryError)
MOST_ERRORS = some_quick(ERRORS, 2)  # a full memory is a RuntimeError too
KINDS = (
    "ModelSite", "TransformerSite", "BlockSite", "BlockAttentionSite", "AttentionSite", "PartSite", "SamplingScope",
)  # fmt: skip


def places(handle: Any) -> dict[str, list[Any]]:
    """Every wrap of a patch, by the name of its class."""
    found: dict[str, list[Any]] = {}
    for wrap in wraps_of(handle):
        found.setdefault(type(wrap).__name__, []).append(wrap)
    return found


class Fault:
    """Stands where a wrap calls on, and raises once: before what lies beneath has run, or after it.

    at: which of its calls raises. It is a class of its own, because the patch asks for its targets' class at every
    call; a self-attention of another class would have another code, so there it is its first layer, or its last.
    """

    def __init__(self, wrap: Any, error: type[BaseException], after: bool, at: int = 0) -> None:
        self.error, self.after, self.left = error, after, at + 1
        self.target, self.name = wrap.target, wrap.name
        if isinstance(wrap, AttentionSite):
            last = wrap.target.to_out[-1] if isinstance(wrap.target.to_out, nn.ModuleList) else wrap.target.to_out
            self.target = last if after else wrap.target.to_q
        self.own = type(self.target)
        calls = {self.name: lambda target, *args, **kwargs: self._call(target, *args, **kwargs)}
        self.target.__class__ = type(self.own.__name__, (self.own,), calls)

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        self.left -= 1
        if self.left == 0 and not self.after:
            raise self.error("by the test")
        out = getattr(self.own, self.name)(*args, **kwargs)
        if self.left == 0:
            raise self.error("by the test")
        return out

    def gone(self) -> bool:
        """Take it out again; did it raise?"""
        self.target.__class__ = self.own
        return self.left <= 0
