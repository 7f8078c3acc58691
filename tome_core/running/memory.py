"""Which call a tensor belonged to, for gradient checkpointing."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch

from .run import is_transformed


class CallMemory:
    """A checkpoint runs a block again during the backward pass, when the UNet's call is over.

    The UNet may have been called at another size and time since. The block's input is kept alive until then, so its
    address tells which call it was.
    """

    LIMIT = 4096

    def __init__(self) -> None:
        self._calls: OrderedDict[int, Any] = OrderedDict()

    @property
    def has_calls(self) -> bool:
        """Is any call remembered?"""
        return bool(self._calls)

    def keep(self, x: torch.Tensor, call: Any) -> None:
        """Remember the call of ``x``, unless no backward pass can follow."""
        if torch.compiler.is_compiling() or torch.is_inference_mode_enabled() or is_transformed(x):
            return
        self._calls[x.data_ptr()] = call
        self._calls.move_to_end(x.data_ptr())
        if len(self._calls) > self.LIMIT:
            self._calls.popitem(last=False)

    def recall(self, x: Any) -> Any | None:
        """The call of ``x``, or None."""
        if not self._calls or type(x) is not torch.Tensor or is_transformed(x):
            return None
        return self._calls.get(x.data_ptr())

    def clear(self) -> None:
        """Remember nothing."""
        self._calls.clear()

    def __getstate__(self) -> dict[str, Any]:
        return {"_calls": OrderedDict()}  # addresses mean nothing to a copy
