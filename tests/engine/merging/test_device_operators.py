"""Merging uses only operators that DirectML and MPS have, in half and single precision, no float64."""

from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import tome_core
from tests.small_models.families import MODELS, some_models
from tests.small_models.sd_block import SpatialTransformer, UNet
from tests.watching.operators import OperatorRecorder, lacking
from tome_core import MergeConfig
from tome_core.merging import plan
from tome_core.merging.methods import base
from tome_core.settings.presets import PRESETS
from tome_core.settings.schedule import STABLE_DIFFUSION

# the match is new, kept, then renewed, in the early phase and in the late one
TIMES = (900.0, 890.0, 800.0, 200.0, 190.0, 100.0)
ON_THE_CPU = {"cumprod"}  # operators for a picture's list of positions, which is read on the CPU
CLUSTERS = MergeConfig(method="cluster", ratio=0.9, side="kv")
OTHERS = {"as tomesd": MergeConfig(ratio=0.5, proportional=False, correction=False, merge_mlp=True),
          "clusters": CLUSTERS}  # fmt: skip
LIKE_BALANCED = ("quality", "fast")  # but for their ratios


@pytest.fixture
def _as_on_directml(monkeypatch):
    monkeypatch.setattr(plan, "_WITHOUT_INDEX_ADD", ("cpu",))
    monkeypatch.setattr(base, "_WITH_SLOW_MAX", ())


def operators_of(model, call, config) -> OperatorRecorder:
    """The operators of calls at `TIMES`, with products instead of fused attention."""
    with tome_core.patch(model, config, host_clock=True) as handle:
        with sdpa_kernel(SDPBackend.MATH), OperatorRecorder() as used:
            for timestep in TIMES:
                handle.set_time(timestep=timestep, sampling="one")
                call(timestep)
        assert handle.report().merged_anything
    return used


def of_a_block(config, dtype: torch.dtype) -> OperatorRecorder:
    """The operators of a block on a grid of 32 x 32 tokens."""
    unet = UNet([[SpatialTransformer(16, 2, 16)]]).to(dtype).eval().requires_grad_(False)
    latent, text = torch.randn(2, 16, 32, 32).to(dtype), torch.randn(2, 7, 16).to(dtype)
    return operators_of(unet, lambda timestep: unet(latent, None, text), config)


@pytest.mark.parametrize("name, dtype", [
    *(pytest.param(name, torch.float16, marks=[pytest.mark.slow] * (name in LIKE_BALANCED))
      for name in (*PRESETS, *OTHERS)),
    ("balanced", torch.float32), pytest.param("balanced", torch.bfloat16, marks=pytest.mark.slow)], ids=str)
@pytest.mark.usefixtures("_as_on_directml")
def test_merged_calls_use_only_operators_that_devices_without_fused_attention_have(name, dtype):
    used = of_a_block(OTHERS.get(name, name), dtype)
    assert len(used.names) > 20 and not lacking(used.names)
    assert not used.doubles


def test_merged_calls_use_only_operators_that_mps_has_if_rows_are_added_by_index():
    assert lacking(of_a_block("balanced", torch.float16).names) == {"DirectML": ["index_add_"]}
    clusters = replace(CLUSTERS, method="cluster-similarity")
    assert "MPS" not in lacking(of_a_block(clusters, torch.float16).names)


@some_models("sd15", "motion", "gligen", "Flux", "Wan")
@pytest.mark.usefixtures("_as_on_directml")
def test_in_a_whole_model_merging_adds_only_operators_that_those_devices_have(family):
    """The unmerged model's own operators are left out."""
    model = family.build()
    with sdpa_kernel(SDPBackend.MATH), OperatorRecorder() as unmerged:
        family.call(model, timestep=TIMES[0])
    config = replace(tome_core.preset("balanced"), only_if_it_pays=False)
    used = operators_of(model, lambda timestep: family.call(model, timestep=timestep), config)
    added = used.names - unmerged.names - ON_THE_CPU
    assert added and not lacking(added)
    assert used.doubles <= unmerged.doubles


def test_patching_an_ldm_model_reads_its_noise_schedule_without_float64():
    model = MODELS["ldm_wrapped"].build()
    model.betas = torch.tensor(STABLE_DIFFUSION.betas)
    with OperatorRecorder() as used:
        tome_core.patch(model, MergeConfig(max_beta=0.5)).remove()
    assert not used.doubles
