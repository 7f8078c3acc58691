"""The webuis' attentions, described for the engine. Names only: none of their modules is imported."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..tome_core import hosting
from . import host

# A1111 puts one of these onto the attentions of ldm and sgm; its others call torch's or xformers' function themselves.
# True: it multiplies by ``self.scale``, before or after the product; False: by the width of a head to the power -1/2
_OPTIMIZATIONS = "modules.sd_hijack_optimizations"
_BY_HAND = {
    f"{_OPTIMIZATIONS}.split_cross_attention_forward": True,
    f"{_OPTIMIZATIONS}.split_cross_attention_forward_v1": True,
    f"{_OPTIMIZATIONS}.split_cross_attention_forward_invokeAI": True,
    f"{_OPTIMIZATIONS}.sub_quad_attention_forward": False,
    # torch's function, held to flash or plain products: a bias would leave the plain ones
    f"{_OPTIMIZATIONS}.scaled_dot_product_no_mem_attention_forward": False,
    "modules.hypernetworks.hypernetwork.attention_CrossAttention_forward": True,
}
_OF_THE_FORGES = ("attention_function", "optimized_attention", "optimized_attention_masked")


class _Hijacked(hosting.ForwardOnStandIn):
    """A1111's: hypernetworks, found by the width of their tokens, lie before the projections of keys and values."""

    def keys_and_values(
        self, module: nn.Module, keys: torch.Tensor, values: torch.Tensor, kwargs: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Through the hypernetworks that are loaded. Both come from the same tokens: A1111 knows no others."""
        return super().keys_and_values(module, *host.through_hypernetworks(keys), kwargs)

    def attend(
        self, module: nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: None, kwargs: dict[str, Any]
    ) -> torch.Tensor:
        """What the forward in force makes of them. No hypernetwork is for one channel, so none comes in twice."""
        return type(module).forward(hosting.StandIn(module, q, k, v), q, context=k[..., :1])


class _OfForge(hosting.ByHeads):
    """The Forges' function. Some take a bias for square, or cut it by queries if memory is short: it gets none."""

    def takes_bias(self) -> bool | None:
        """Never; None if it is no attention."""
        return None if super().takes_bias() is None else False


def _beneath_idle_hypertile(module: nn.Module, wrapper: Any) -> Any:
    """A1111 leaves HyperTile's wrappers on every attention when it is off, from its first job to the last."""
    params = vars(module).get(host.HYPERTILE)
    is_idle = params is not None and not params.enabled and getattr(wrapper, "__wrapped__", None) is params.forward
    return params.forward if is_idle else None


def describe() -> None:
    """Make them all known to the engine; those of other webuis are never asked for."""
    for forward, by_attribute in _BY_HAND.items():
        hosting.register(forward, _Hijacked(by_attribute))
    for name in _OF_THE_FORGES:
        hosting.register_name(name, _OfForge)
    hosting.register_wrapper("HyperTile", _beneath_idle_hypertile)
