"""accelerate's and diffusers' ways to keep a model's weights elsewhere, on the CPU alone; and how they are undone."""

from __future__ import annotations

import torch
from accelerate import cpu_offload, cpu_offload_with_hook, dispatch_model
from accelerate.hooks import AlignDevicesHook, add_hook_to_module, remove_hook_from_module
from diffusers.hooks import apply_group_offloading
from torch import nn

CPU = torch.device("cpu")
_OF_GROUPS = ("group_offloading", "layer_execution_tracker", "lazy_prefetch_group_offloading")


def sequentially(model: nn.Module) -> None:
    """Weights live elsewhere and come for each module's own call."""
    cpu_offload(model, CPU, offload_buffers=True)


def as_a_model(model: nn.Module) -> None:
    cpu_offload_with_hook(model, CPU)


def dispatched(model: nn.Module) -> None:
    names = {name for name, _ in model.named_children()} | {name for name, _ in model.named_parameters(recurse=False)}
    dispatch_model(model, dict.fromkeys(names, "cpu"), main_device="cpu", force_hooks=True)


def hooked_everywhere(model: nn.Module) -> None:
    add_hook_to_module(model, AlignDevicesHook(CPU, io_same_device=True), append=True)
    for module in list(model.modules())[1:]:
        add_hook_to_module(module, AlignDevicesHook(CPU), append=True)


def in_groups_of_blocks(model: nn.Module) -> None:
    apply_group_offloading(model, CPU, offload_type="block_level", num_blocks_per_group=1)


def in_groups_of_leaves(model: nn.Module) -> None:
    apply_group_offloading(model, CPU, offload_type="leaf_level")


OF_ACCELERATE = (sequentially, as_a_model, dispatched, hooked_everywhere)
OF_DIFFUSERS = (in_groups_of_blocks, in_groups_of_leaves)


def take_off(model: nn.Module) -> None:
    """Whatever of these is on it."""
    remove_hook_from_module(model, recurse=True)
    registry = getattr(model, "_diffusers_hook", None)
    for name in _OF_GROUPS if registry is not None else ():
        registry.remove_hook(name, recurse=True)
