"""ComfyUI's attention, described for the engine. Names only: nothing of ComfyUI is imported."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .engine import tome_core

_HOME = "comfy.ldm.modules.attention"
_FORWARD = f"{_HOME}.CrossAttention.forward"
OVERRIDE = "optimized_attention_override"  # in transformer_options, since September 2025: a node's own function
_CHOOSING = "comfy.model_patcher.ModelPatcher.set_model_optimized_attention.<locals>.optimized_attention_override"
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
        home = type(module).forward.__globals__
        override = (kwargs.get("transformer_options") or {}).get(OVERRIDE)
        if override is not None:
            return adds_a_mask(find_chosen(override), home)
        function = home.get("optimized_attention")
        return function is home.get("optimized_attention_masked") and adds_a_mask(function, home)

    def attend(
        self, module: nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None,
        kwargs: dict[str, Any],
    ) -> torch.Tensor:  # fmt: skip
        """What the module's ``forward`` makes of them, with the options of this step."""
        mask = None if bias is None else bias[:, None]  # [B, 1, 1, G]
        stand_in = tome_core.attention.StandIn(module, q, k, v)
        return type(module).forward(stand_in, q, context=k, **{**kwargs, "mask": mask})


def adds_a_mask(function: Any, home: dict[str, Any] | None = None) -> bool:
    """Is it one of `_ADDING`, and ComfyUI's own, below decorators of ComfyUI's own? home: the globals of these."""
    if home is None and getattr(function, "__module__", None) == _HOME:
        home = getattr(function, "__globals__", None)
    while home is not None and getattr(function, "__globals__", None) is home:
        inner = getattr(function, "__wrapped__", None)
        if inner is None:
            return function.__name__ in _ADDING
        function = inner
    return False


def find_chosen(override: Any) -> Any | None:
    """The attention that an override calls with everything it is given; None where that is not known.

    ComfyUI's own (ModelPatcher.set_model_optimized_attention, which its ModelAttentionBackend uses) does.
    """
    if getattr(override, "__module__", "") + "." + getattr(override, "__qualname__", "") != _CHOOSING:
        return None
    cells = dict(zip(override.__code__.co_freevars, override.__closure__ or (), strict=True))
    return cells["optimized_attention"].cell_contents if "optimized_attention" in cells else None


def function_in_force(unet: nn.Module, options: dict) -> str:
    """What tells the attention of a UNet's calls from all others. options: the calls' transformer_options."""
    override = options.get(OVERRIDE)
    if override is not None:
        return " ".join(_name_of(one) for one in (override, find_chosen(override)) if one is not None)
    attention = getattr(tome_core.model.families.find_blocks(unet)[0].block, "attn1", None)
    return _name_of(getattr(type(attention).forward, "__globals__", {}).get("optimized_attention"))


def tell(options: dict) -> dict[str, Any]:
    """What of a call's transformer_options decides its attention, as a keyword of the UNet's forward."""
    override = options.get(OVERRIDE)
    return {} if override is None else {"transformer_options": {OVERRIDE: override}}


def _name_of(function: Any) -> str:
    return "" if function is None else f"{function.__module__}.{getattr(function, '__qualname__', type(function))}"


def register() -> None:
    """Make it known to the engine."""
    tome_core.attention.register(_FORWARD, _CrossAttention(by_attribute=False))
