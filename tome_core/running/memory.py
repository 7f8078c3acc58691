"""Which call a tensor belonged to, for gradient checkpointing."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch

from .tensors import is_transformed


class CallMemory:
    """A checkpoint runs a block again during the backward pass, when the UNet's call is over, and others may have been.

    The block's input is kept alive until then, so its address tells which call it was. calls: by it, the latest last.
    """

    LIMIT = 4096

    def __init__(self) -> None:
        self.calls: OrderedDict[int, Any] = OrderedDict()

    def keep(self, x: torch.Tensor, call: Any) -> None:
        """Remember the call of ``x``, unless no backward pass can follow."""
        if torch.compiler.is_compiling() or torch.is_inference_mode_enabled() or is_transformed(x):
            return
        self.calls[x.data_ptr()] = call
        self.calls.move_to_end(x.data_ptr())
        if len(self.calls) > self.LIMIT:
            self.calls.popitem(last=False)

    def forget(self, x: Any) -> None:
        """What lies there now is of no call, whatever lay at its address before."""
        if type(x) is torch.Tensor and not is_transformed(x):
            self.calls.pop(x.data_ptr(), None)

    def recall(self, x: Any) -> Any | None:
        """The call of ``x``, or None."""
        if not self.calls or type(x) is not torch.Tensor or is_transformed(x):
            return None
        return self.calls.get(x.data_ptr())

    def __getstate__(self) -> dict[str, Any]:
        return {"calls": OrderedDict()}  # addresses mean nothing to a copy
