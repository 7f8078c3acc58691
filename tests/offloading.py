"""accelerate's and diffusers' ways to keep a model's weights elsewhere, on the CPU alone; and how they are undone."""

from __future__ import annotations

import torch
from accelerate import cpu_offload, cpu_offload_with_hook
from accelerate.hooks import remove_hook_from_module
from diffusers.hooks import apply_group_offloading
from torch import nn

CPU = torch.device("cpu")
_OF_GROUPS = ("group_offloading", "layer_execution_tracker", "lazy_prefetch_group_offloading")


def sequentially(model: nn.Module) -> None:
    """Weights live elsewhere and come for each module's own call."""
    cpu_offload(model, CPU, offload_buffers=True)


def as_a_model(model: nn.Module) -> None:
    cpu_offload_with_hook(model, CPU)


def in_groups_of_leaves(model: nn.Module) -> None:
    apply_group_offloading(model, CPU, offload_type="leaf_level")


def take_off(model: nn.Module) -> None:
    """Whatever of these is on it."""
    remove_hook_from_module(model, recurse=True)
    registry = getattr(model, "_diffusers_hook", None)
    for name in _OF_GROUPS if registry is not None else ():
        registry.remove_hook(name, recurse=True)
