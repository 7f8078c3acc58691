"""The webuis' attentions, described for the engine. Names only: none of their modules is imported."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from ..tome_core.attention import ForwardOnStandIn, StandIn, register
from ..tome_core.attention.registry import function_name
from ..tome_core.model.idle import register_wrapper
from . import host

# A1111 puts one of these onto the attentions of ldm and sgm. True: it multiplies by ``self.scale``, before or after
# the product; False: by the width of the heads to the power -1/2, as the libraries do that it calls.
_OPTIMIZATIONS = "modules.sd_hijack_optimizations"
_A1111 = {
    f"{_OPTIMIZATIONS}.split_cross_attention_forward": True,
    f"{_OPTIMIZATIONS}.split_cross_attention_forward_v1": True,
    f"{_OPTIMIZATIONS}.split_cross_attention_forward_invokeAI": True,
    f"{_OPTIMIZATIONS}.sub_quad_attention_forward": False,
    f"{_OPTIMIZATIONS}.xformers_attention_forward": False,
    # flash or plain products: a mask would leave the plain ones
    f"{_OPTIMIZATIONS}.scaled_dot_product_no_mem_attention_forward": False,
    "modules.hypernetworks.hypernetwork.attention_CrossAttention_forward": True,
}
_TORCH = f"{_OPTIMIZATIONS}.scaled_dot_product_attention_forward"
# What adds a mask of four dimensions to the scaled logits before the softmax, and an argument that it then has. Forge's
# others cut a mask by queries, also where it has one row for all of them, or take it for square; attention_sub_quad may
# take the maximum first. Forge Classic's have reForge's names, but hold heads within the batch: all but one would fail.
_FORGE = "backend.attention"
_FORGE_ADDING = dict.fromkeys(("attention_basic", "attention_pytorch"), "mask")
_REFORGE = "ldm_patched.ldm.modules.attention"
_NEWER = "skip_output_reshape"
_REFORGE_ADDING = {
    **dict.fromkeys(("attention_basic", "attention_split", "attention_xformers"), _NEWER), "attention_pytorch": "mask",
}  # fmt: skip
# Classic's for SDXL, which goes to SageAttention 1 with whatever it is given, and that ends the job at other widths
_OF_THREE_WIDTHS, _ITS_WIDTHS = f"{_REFORGE}.attention_sage", (64, 96, 128)


class _WithoutMask(ForwardOnStandIn):
    """Where a mask is all that can come along and change the result."""

    def problem(self, module: nn.Module, kwargs: dict[str, Any]) -> str | None:
        """A mask; what else A1111's forwards are given they ignore."""
        return "a mask came along" if kwargs.get("mask") is not None else None


class _Hijacked(_WithoutMask):
    """A1111's: hypernetworks, found by the width of their tokens, lie before the projections of keys and values."""

    def keys_and_values(
        self, module: nn.Module, keys: torch.Tensor, values: torch.Tensor, kwargs: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Through the hypernetworks that are loaded."""
        return super().keys_and_values(module, *host.through_hypernetworks(keys, values), kwargs)

    def attend(
        self, module: nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None,
        kwargs: dict[str, Any],
    ) -> torch.Tensor:  # fmt: skip
        """What the forward in force makes of them. No hypernetwork is for one channel, so none comes in twice."""
        return type(module).forward(_Masked(module, q, k, v), q, context=k[..., :1], mask=bias)


class _Masked(StandIn):
    """A stand-in that can prepare a mask, which neither ldm's nor sgm's attention can."""

    def prepare_attention_mask(self, mask: torch.Tensor, *_: Any) -> torch.Tensor:
        """``[B, 1, G]`` to ``[B*H, 1, G]``."""
        return mask.repeat_interleave(self.heads, 0)


class _HijackedByTorch(_Hijacked):
    """The one of them that has a use for a mask."""

    def takes_bias(self, module: nn.Module, q: torch.Tensor, k: torch.Tensor, kwargs: dict[str, Any]) -> bool:
        """Unless it casts q, k and v, but not the mask."""
        return not host.option("upcast_attn", False)


class _ByFunction(_WithoutMask):
    """The Forges': ``forward`` calls a function of its own module's, by one name, or with a mask by another."""

    def __init__(self, names: Iterable[str], where: str, adding: Mapping[str, str]) -> None:
        super().__init__(by_attribute=False)
        self._names = tuple(names)
        self._adding = {f"{where}.{one}": argument for one, argument in adding.items()}

    def problem(self, module: nn.Module, kwargs: dict[str, Any]) -> str | None:
        """A mask, or a function that fails at the only way on which it could be told of sizes."""
        function = type(module).forward.__globals__.get(self._names[0])
        is_of_three = function_name(function) == _OF_THREE_WIDTHS and not _takes(function, _NEWER)
        if is_of_three and module.dim_head in _ITS_WIDTHS:
            return "its function takes no wider heads"
        return super().problem(module, kwargs)

    def takes_bias(self, module: nn.Module, q: torch.Tensor, k: torch.Tensor, kwargs: dict[str, Any]) -> bool:
        """Where the function in force is known to add a mask, and would be called with a mask too."""
        home = type(module).forward.__globals__
        function, *others = (home.get(name) for name in self._names)
        if any(other is not function for other in others) or hasattr(function, "__wrapped__"):
            return False
        argument = self._adding.get(function_name(function))
        return argument is not None and _takes(function, argument)


def _takes(function: Any, argument: str) -> bool:
    code = getattr(function, "__code__", None)
    return code is not None and argument in code.co_varnames[: code.co_argcount]


def _beneath_idle_hypertile(module: nn.Module, wrapper: Any) -> Any:
    """A1111 leaves HyperTile's wrappers on every attention when it is off, from its first job to the last."""
    params = vars(module).get(host.HYPERTILE)
    is_idle = params is not None and not params.enabled and getattr(wrapper, "__wrapped__", None) is params.forward
    return params.forward if is_idle else None


def describe() -> None:
    """Make them all known to the engine; those of other webuis are never asked for."""
    for forward, by_attribute in _A1111.items():
        register(forward, _Hijacked(by_attribute))
    register(_TORCH, _HijackedByTorch(by_attribute=False))
    register_wrapper("HyperTile", _beneath_idle_hypertile)
    forge = _ByFunction(["attention_function"], _FORGE, _FORGE_ADDING)
    register("backend.nn.unet.CrossAttention.forward", forge)
    names = ("optimized_attention", "optimized_attention_masked")
    register(f"{_REFORGE}.CrossAttention.forward", _ByFunction(names, _REFORGE, _REFORGE_ADDING))
