"""ComfyUI's attention, described for the engine. Names only: nothing of ComfyUI is imported."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .engine import tome_core

_FORWARD = "comfy.ldm.modules.attention.CrossAttention.forward"
_OVERRIDE = "optimized_attention_override"  # in transformer_options, since September 2025: a node's own function
# What adds a mask of four dimensions to the scaled logits before the softmax, whatever their precision, in every
# version that has wrappers. Not attention_sub_quad: short of memory it takes the maximum first and adds then, so that
# a group without tokens may hold the maximum, and all others vanish. The rest leave masks to another function.
_ADDING = frozenset({"attention_basic", "attention_split", "attention_xformers", "attention_pytorch"})


class _CrossAttention(tome_core.attention.ForwardOnStandIn):
    """``CrossAttention``, whose ``forward`` calls the function that its module names ``optimized_attention``.

    Its own ``forward`` is run, so that whatever chooses the function, or its precision, goes on doing so. All of them
    scale by the width of the heads that they get.
    """

    def problem(self, module: nn.Module, kwargs: dict[str, Any]) -> str | None:
        """Anything but the options that a step hands through all blocks."""
        others = [name for name, value in kwargs.items() if name != "transformer_options" and value is not None]
        return f"{' and '.join(others)} came along" if others else None

    def takes_bias(self, module: nn.Module, q: torch.Tensor, k: torch.Tensor, kwargs: dict[str, Any]) -> bool:
        """Where the function in force is one of ComfyUI's that add a mask, and would be called with a mask too."""
        if _OVERRIDE in (kwargs.get("transformer_options") or ()):
            return False
        home = type(module).forward.__globals__
        function = home.get("optimized_attention")
        return function is home.get("optimized_attention_masked") and _adds_a_mask(function, home)

    def attend(
        self, module: nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None,
        kwargs: dict[str, Any],
    ) -> torch.Tensor:  # fmt: skip
        """What the module's ``forward`` makes of them, with the options of this step."""
        mask = None if bias is None else bias[:, None]  # [B, 1, 1, G]
        stand_in = tome_core.attention.StandIn(module, q, k, v)
        return type(module).forward(stand_in, q, context=k, **{**kwargs, "mask": mask})


def _adds_a_mask(function: Any, home: dict[str, Any]) -> bool:
    """Is it one of `_ADDING`, and ComfyUI's own, below decorators of ComfyUI's own?"""
    while getattr(function, "__globals__", None) is home:
        inner = getattr(function, "__wrapped__", None)
        if inner is None:
            return function.__name__ in _ADDING
        function = inner
    return False


def register() -> None:
    """Make it known to the engine."""
    tome_core.attention.register(_FORWARD, _CrossAttention("ComfyUI", by_attribute=False))
