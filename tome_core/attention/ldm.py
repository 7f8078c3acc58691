"""The attentions of CompVis' and Stability AI's own code (packages ``ldm`` and ``sgm``), as they are without a host."""

from __future__ import annotations

from torch import nn

from . import registry
from .known import ForwardOnStandIn, Kwargs


class _Sgm(ForwardOnStandIn):
    """sgm's: tokens may be added to the picture's, which only its own ``forward`` can keep apart."""

    def problem(self, module: nn.Module, kwargs: Kwargs) -> str | None:
        return "additional tokens came along" if kwargs.get("additional_tokens") is not None else None


class _SgmOfTorch(_Sgm):
    """sgm's by torch's function, which gets the mask as it is."""

    adds_bias = True


def register() -> None:
    """Describe them all. Whether one scales by its attribute or by its heads' width is read in its source."""
    ldm, sgm = "ldm.modules.attention", "sgm.modules.attention"
    registry.register(f"{ldm}.CrossAttention.forward", ForwardOnStandIn(by_attribute=True))
    registry.register(f"{sgm}.CrossAttention.forward", _SgmOfTorch(by_attribute=False))
    efficient = "MemoryEfficientCrossAttention.forward"
    registry.register(f"{ldm}.{efficient}", ForwardOnStandIn(by_attribute=False))
    registry.register(f"{sgm}.{efficient}", _Sgm(by_attribute=False))
