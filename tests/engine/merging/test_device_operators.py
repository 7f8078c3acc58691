"""What merging asks of a device: operators that DirectML and MPS have, in half and single precision, no float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import tome_core
from benchmarks.sd_block import SpatialTransformer, UNet
from tests import tiny_transformers
from tests.families import every_family_in_time
from tests.models import BY_NAME, call_case
from tests.operators import DIRECTML, OperatorRecorder, directml_has, lacking, mps_has
from tests.thoroughness import some_quick
from tome_core import MergeConfig
from tome_core.merging import plan
from tome_core.settings.presets import PRESETS
from tome_core.settings.schedule import STABLE_DIFFUSION

# a match that is new, one that is kept, one that is renewed, early and late
TIMES = (900.0, 890.0, 800.0, 200.0, 190.0, 100.0)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ON_THE_CPU = {"cumprod"}  # of a picture's list of positions, which is read there
OTHERS = {
    "as tomesd": MergeConfig(ratio=0.5, proportional=False, correction=False, merge_mlp=True),
    "cluster": MergeConfig(method="cluster", ratio=0.9, side="kv"),
}


def merged(config, dtype: torch.dtype) -> OperatorRecorder:
    """The operators of a picture's calls, on a grid of 32 x 32 tokens, by products instead of fused attention."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        unet = UNet([[SpatialTransformer(16, 2, 16)]]).to(dtype).eval().requires_grad_(False)
    latent, text, sampling = torch.randn(2, 16, 32, 32).to(dtype), torch.randn(2, 7, 16).to(dtype), object()
    with sdpa_kernel(SDPBackend.MATH), tome_core.patch(unet, config, host_clock=True) as handle:
        with OperatorRecorder() as used:
            for timestep in TIMES:
                handle.set_time(timestep=timestep, sampling=sampling)
                out = unet(latent, torch.tensor([timestep]), text)
        assert out.isfinite().all() and handle.report().merged_anything
    return used


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("config", [*PRESETS, *OTHERS])
def test_merged_calls_use_only_operators_that_devices_without_fused_attention_have(config, dtype, monkeypatch):
    monkeypatch.setattr(plan, "_WITHOUT_INDEX_ADD", ("cpu",))  # as on DirectML
    used = merged(OTHERS.get(config, config), dtype)
    assert len(used.names) > 20 and not lacking(used.names)
    assert not used.doubles


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_merged_calls_use_only_operators_that_mps_has_where_rows_are_added_by_index(dtype):
    used = merged("balanced", dtype)
    assert "index_add_" in used.names and set(lacking(used.names)) == {"DirectML"}
    assert lacking(used.names)["DirectML"] == ["index_add_"]
    clusters = MergeConfig(method="cluster-similarity", ratio=0.9)
    assert "MPS" not in lacking(merged(clusters, dtype).names)


@every_family_in_time
def test_in_every_family_merging_adds_only_what_those_devices_have(case, monkeypatch):
    model = case.build()
    _adds_only_what_devices_have(model, lambda time: call_case(case, model, timestep=time), monkeypatch)


@pytest.mark.parametrize("name", some_quick(tiny_transformers.PRESENT))
def test_in_every_transformer_merging_adds_only_what_those_devices_have(name, monkeypatch):
    model, arguments = tiny_transformers.make(name)
    _adds_only_what_devices_have(model, lambda timestep: tiny_transformers.call(model, arguments), monkeypatch)


def _adds_only_what_devices_have(model, call, monkeypatch):
    """Patched and called at `TIMES`, against a call without us; what the model asks for itself is its own."""
    monkeypatch.setattr(plan, "_WITHOUT_INDEX_ADD", ("cpu",))
    config = replace(tome_core.preset("balanced"), only_if_it_pays=False)
    with sdpa_kernel(SDPBackend.MATH), OperatorRecorder() as own:
        call(TIMES[0])
    with tome_core.patch(model, config, host_clock=True) as handle:
        with sdpa_kernel(SDPBackend.MATH), OperatorRecorder() as used:
            for timestep in TIMES:
                handle.set_time(timestep=timestep, sampling=TIMES)
                call(timestep)
        assert handle.report().merged_anything
    added = used.names - own.names - ON_THE_CPU
    assert added and not lacking(added)
    assert used.doubles <= own.doubles


def test_patching_an_ldm_model_reads_its_noise_schedule_without_float64():
    model = BY_NAME["ldm_wrapped"].build()
    model.betas = torch.tensor(STABLE_DIFFUSION.betas)
    with OperatorRecorder() as used:
        tome_core.patch(model, MergeConfig(max_beta=0.5)).remove()
    assert not used.doubles


def test_means_are_the_same_whichever_operator_adds(monkeypatch):
    merge = plan.MergePlan(torch.tensor([[0, 1, 1, 0, 3], [2, 2, 2, 2, 2]]), 4).merge
    x = torch.randn(2, 5, 3)
    expected = merge(x)
    monkeypatch.setattr(plan, "_WITHOUT_INDEX_ADD", ("cpu",))
    assert torch.allclose(merge(x), expected, atol=1e-6)


def test_a_recorder_sees_what_is_not_there_and_float64():
    with OperatorRecorder() as used:
        torch.linalg.inv(torch.eye(2, dtype=torch.float64))
    assert used.doubles and "DirectML" in lacking(used.names)
    assert mps_has("sort.stable") and not mps_has("linalg_eig") and not directml_has("linalg_inv_ex")
    assert {"scatter_add", "sort", "baddbmm"} <= DIRECTML and "index_add" not in DIRECTML
