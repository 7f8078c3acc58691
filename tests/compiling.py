"""UNets as small as a compiler can be given, compiled whole, and the times at which they are called."""

from __future__ import annotations

import shutil

import pytest
import torch

from tests.models import BY_NAME, ModelCase, call_case, call_ldm, call_unet, ldm_of_one_level, seeded, unet

TIMES = [torch.tensor(time) for time in range(40, 1000, 48)]
for_inductor = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="inductor needs a C++ compiler")  # fmt: skip


# as little as a compiler can be given: four blocks, all on the latent's level
_ONE_LEVEL = {"block_out_channels": (16,), "down_block_types": ("CrossAttnDownBlock2D",),
              "up_block_types": ("CrossAttnUpBlock2D",)}  # fmt: skip
SMALL = ModelCase("one_level", seeded(unet, **_ONE_LEVEL), call_unet)
BY_NAME["one_level_ldm"] = ModelCase("one_level_ldm", ldm_of_one_level, call_ldm)
# 12 blocks, more than a compiler makes graphs for one place
many_blocks = seeded(unet, layers_per_block=2, transformer_layers_per_block=2, block_out_channels=(16, 16),
                     norm_num_groups=4)  # fmt: skip


def compiled(model, backend):
    """The whole model compiled; for an LDM model its UNet, which is what a host compiles."""
    if hasattr(model, "model"):
        model.model.diffusion_model = torch.compile(model.model.diffusion_model, backend=backend, fullgraph=True)
        return model
    return torch.compile(model, backend=backend, fullgraph=True)


def skip_where_unpatched_fails(case) -> None:
    """Old compilers cannot take every UNet whole even as it is."""
    if int(torch.__version__.split(".")[1]) >= 6:
        return
    try:
        call_case(case, compiled(case.build(), "eager"))
    except torch._dynamo.exc.Unsupported:
        pytest.skip(f"torch {torch.__version__} cannot compile {case.name} whole without any patch either")
    torch._dynamo.reset()
