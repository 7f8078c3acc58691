"""Models as small as a compiler can be given, the ways in which they are compiled, and the times they are called at."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from tests.families import MODELS, Family
from tests.models import ModelCase, call_case, call_unet, seeded, unet
from tome_core.models import compiled, find_models

TIMES = [torch.tensor(time) for time in range(40, 1000, 48)]
for_inductor = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="inductor needs a C++ compiler")  # fmt: skip
where_compilers_were_tried = pytest.mark.skipif(not compiled._TRIED, reason="this torch's compiler is left alone")

# as little as a compiler can be given: four blocks, all on the latent's level
SMALL = ModelCase("least", seeded(
    unet, block_out_channels=(16,), down_block_types=("CrossAttnDownBlock2D",), up_block_types=("CrossAttnUpBlock2D",),
), call_unet)  # fmt: skip
LEAST = Family(SMALL.name, SMALL.build, partial(call_case, SMALL))
# 12 blocks, more than a compiler makes graphs for one place
MANY = Family("many blocks", seeded(unet, layers_per_block=2, transformer_layers_per_block=2,
                                    block_out_channels=(16, 16), norm_num_groups=4), LEAST.call)  # fmt: skip
COMPILED = {LEAST.name: LEAST, MANY.name: MANY, **MODELS}
# no compiler takes their forwards whole, with us or without
WITH_BREAKS = ("Lumina 2", "HiDream", "HunyuanImage", "HunyuanVideo 1.5")


def whole(one: Family, model: Any, backend: Any = "eager") -> nn.Module:
    """The model, to be called in its place; an LDM model has it inside."""
    made = partial(torch.compile, backend=backend, fullgraph=one.name not in WITH_BREAKS)
    if not hasattr(model, "model"):
        return made(model)
    model.model.diffusion_model = made(model.model.diffusion_model)
    return model


def in_place(one: Family, model: Any, backend: Any = "eager") -> nn.Module:
    find_models(model)[0].compile(backend=backend, fullgraph=one.name not in WITH_BREAKS)
    return model


def by_blocks(one: Family, model: Any, backend: Any = "eager") -> nn.Module:
    if not getattr(model, "_repeated_blocks", None):
        pytest.skip("this class names no repeated blocks")
    model.compile_repeated_blocks(backend=backend, fullgraph=True)
    return model


def by_attentions(one: Family, model: Any, backend: Any = "eager") -> nn.Module:
    for attention in (one for one in model.modules() if hasattr(one, "to_q")):
        attention.compile(backend=backend, fullgraph=True)
    return model


Way = Callable[..., nn.Module]
