"""Descriptions of the webuis' attentions for the engine, by name, without importing their modules."""

from typing import Any

import torch
from torch import nn

from ..tome_core import hosting
from . import host

# A1111 puts one of these functions on the attentions of ldm and sgm; its others call torch's or xformers' function.
# True: the function scales by ``self.scale``; False: by the width of a head to the power -1/2.
_OPTIMIZATIONS = "modules.sd_hijack_optimizations"
_BY_HAND = {
    f"{_OPTIMIZATIONS}.split_cross_attention_forward": True,
    f"{_OPTIMIZATIONS}.split_cross_attention_forward_v1": True,
    f"{_OPTIMIZATIONS}.split_cross_attention_forward_invokeAI": True,
    f"{_OPTIMIZATIONS}.sub_quad_attention_forward": False,
    # torch's function, restricted to the flash and math kernels: with a bias only math would be left
    f"{_OPTIMIZATIONS}.scaled_dot_product_no_mem_attention_forward": False,
    "modules.hypernetworks.hypernetwork.attention_CrossAttention_forward": True,
}
# A1111's package, that of its LoRA, and those with the Forges' blocks
_PACKAGES = ("modules", "networks", "backend", "ldm_patched")
_OF_THE_FORGES = ("attention_function", "optimized_attention", "optimized_attention_masked")


class _Hijacked(hosting.ForwardOnStandIn):
    """The description of an A1111 attention: loaded hypernetworks change tokens before they become keys and values."""

    def keys_and_values(
        self, module: nn.Module, keys: torch.Tensor, values: torch.Tensor, kwargs: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Project the tokens `keys`, as hypernetworks have changed them, to keys and values; `values` are not used."""
        return super().keys_and_values(module, *host.through_hypernetworks(keys), kwargs)

    def attend(
        self, module: nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: None, kwargs: dict[str, Any]
    ) -> torch.Tensor:
        """Run A1111's ``type(module).forward`` without output projection on q, k, v ``(batch, tokens, channels)``."""
        # a context of one channel fits no hypernetwork, so none is applied twice
        return type(module).forward(hosting.StandIn(module, q, k, v), q, context=k[..., :1])


class _ForgeCall(hosting.HeadsCall):
    """A call of a Forge attention function. It gets no bias, because some functions mistreat one that is not square."""

    def takes_bias(self) -> bool | None:
        """Try the function; return None if it computes no attention, else False: a bias is never given."""
        return None if super().takes_bias() is None else False


def _beneath_idle_hypertile(module: nn.Module, wrapper: Any) -> Any:
    """Return the ``forward`` below a HyperTile wrapper that is off; None if the wrapper is on or of another kind."""
    params = vars(module).get(host.HYPERTILE)
    is_idle = params is not None and not params.enabled and getattr(wrapper, "__wrapped__", None) is params.forward
    return params.forward if is_idle else None


def describe() -> None:
    """Register A1111's attentions, the Forges' functions, HyperTile's wrapper and packages by name; repeatable."""
    for package in _PACKAGES:
        hosting.register_package(package)
    for forward, by_attribute in _BY_HAND.items():
        hosting.register(forward, _Hijacked(by_attribute))
    for name in _OF_THE_FORGES:
        hosting.register_name(name, _ForgeCall)
    hosting.register_wrapper("HyperTile", _beneath_idle_hypertile)
