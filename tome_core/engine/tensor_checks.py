"""What a tensor of a call is: a number, a stand-in without a value, mapped over, or on its way into a CUDA graph."""

from __future__ import annotations

from typing import Any

import torch
import torch.overrides


def is_captured(x: Any) -> bool:
    """Are kernels on this tensor being recorded into a CUDA graph? Nothing may wait for them there, or outlive it."""
    return torch.is_tensor(x) and x.is_cuda and torch.cuda.is_current_stream_capturing()


def is_mapped() -> bool:
    """Are we inside `torch.vmap`? A match there would be one for each of the samples that it maps over."""
    functorch = torch._C._functorch
    return functorch.peek_interpreter_stack() is not None and any(
        one.key() == functorch.TransformType.Vmap for one in functorch.get_interpreter_stack())  # fmt: skip


def foreign_mode() -> str:
    """Why an attention must see all tokens: a function mode of another program looks at its functions. "" if none does.

    Guidance that perturbs attention acts in one, and gives up if there are fewer keys than queries.
    """
    if not torch._C._len_torch_function_stack():
        return ""
    modes = torch.overrides._get_current_function_mode_stack()
    names = [type(one).__name__ for one in modes if type(one).__module__ != "torch.utils._device"]
    return f"{' and '.join(names)} looks at its functions" if names else ""


def common_value(timestep: Any) -> float | None:
    """The timestep as a number, for which a GPU is waited; None where samples differ in it, or it has no value."""
    if not torch.is_tensor(timestep):
        return None if timestep is None else float(timestep)
    if timestep.is_meta or is_transformed(timestep):
        return None
    values = timestep.detach().reshape(-1).tolist()
    return float(values[0]) if values and min(values) == max(values) else None


def is_transformed(x: torch.Tensor) -> bool:
    """Is it a stand-in of torch.func, vmap or a tracer, which has no value and no address?"""
    plain = type(x) in (torch.Tensor, torch.nn.Parameter)
    return not plain or torch._C._functorch.is_functorch_wrapped_tensor(x)
