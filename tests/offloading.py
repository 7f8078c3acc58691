"""accelerate's ways to keep a model's weights elsewhere, on the CPU alone."""

from __future__ import annotations

import torch
from accelerate import cpu_offload, cpu_offload_with_hook, dispatch_model
from accelerate.hooks import AlignDevicesHook, add_hook_to_module

CPU = torch.device("cpu")


def _offload_sequentially(unet) -> None:
    """Weights live elsewhere and come for each module's own call."""
    cpu_offload(unet, CPU, offload_buffers=True)


def offload_as_a_model(unet) -> None:
    cpu_offload_with_hook(unet, CPU)


def _dispatch(unet) -> None:
    names = {name for name, _ in unet.named_children()} | {name for name, _ in unet.named_parameters(recurse=False)}
    dispatch_model(unet, dict.fromkeys(names, "cpu"), main_device="cpu", force_hooks=True)


def _hook_every_module(unet) -> None:
    add_hook_to_module(unet, AlignDevicesHook(CPU, io_same_device=True), append=True)
    for module in list(unet.modules())[1:]:
        add_hook_to_module(module, AlignDevicesHook(CPU), append=True)


WAYS = (_offload_sequentially, offload_as_a_model, _dispatch, _hook_every_module)
