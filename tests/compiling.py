"""Models as small as a compiler can be given, the ways in which they are compiled, and the times they are called at."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests import least_unet
from tests.families import MODELS
from tests.models import Family, call_unet, seeded, unet
from tome_core.models import compiled, find_models

TIMES = [torch.tensor(time) for time in range(40, 1000, 48)]
for_inductor = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="inductor needs a C++ compiler")  # fmt: skip
where_compilers_were_tried = pytest.mark.skipif(not compiled._TRIED, reason="this torch's compiler is left alone")

# four blocks, all on the latent's level
LEAST = Family("least", seeded(
    unet, block_out_channels=(16,), down_block_types=("CrossAttnDownBlock2D",), up_block_types=("CrossAttnUpBlock2D",),
), call_unet)  # fmt: skip
# tests of what any model holds for take the smallest
TINY = least_unet.Least("tiny", depth=1)
COMPILED = {TINY.name: TINY, LEAST.name: LEAST, **MODELS}
WITH_BREAKS = ("Lumina 2",)  # no compiler takes its forward as a whole, with us or without

Way = Callable[..., nn.Module]


def whole(family: Family, model: Any, backend: Any = "eager") -> nn.Module:
    """The model, to be called in its place."""
    return torch.compile(model, backend=backend, fullgraph=family.name not in WITH_BREAKS)


def in_place(family: Family, model: Any, backend: Any = "eager") -> nn.Module:
    find_models(model)[0].compile(backend=backend, fullgraph=True)
    return model


def by_blocks(family: Family, model: Any, backend: Any = "eager") -> nn.Module:
    """As diffusers' `compile_repeated_blocks`."""
    for module in model.modules():
        if type(module).__name__ in getattr(model, "_repeated_blocks", ["BasicTransformerBlock"]):
            module.compile(backend=backend, fullgraph=True)
    return model
