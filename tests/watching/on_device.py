"""Tensors that claim to be on a GPU, for tests of code that waits for it."""

from typing import Any, ClassVar

import torch

_WAITING = {getattr(torch.Tensor, name) for name in ("item", "tolist", "cpu", "numpy", "__float__", "__int__",
                                                     "__bool__", "__index__", "__iter__")}  # fmt: skip


class OnDevice(torch.Tensor):
    """A tensor that computes on the CPU; waits: the names of methods that read values of such tensors."""

    waits: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        """Torch calls this before every operation on such a tensor."""
        if function == torch.Tensor.device.__get__:
            return torch.device("cuda")
        if function in _WAITING:
            cls.waits.append(function.__name__)
        return super().__torch_function__(function, types, args, kwargs or {})


def on_device(x: torch.Tensor) -> OnDevice:
    return x.as_subclass(OnDevice)


def plain(x: torch.Tensor) -> torch.Tensor:
    """The tensor itself, as kernels see it, without waiting."""
    with torch._C.DisableTorchFunctionSubclass():
        return x.as_subclass(torch.Tensor)
