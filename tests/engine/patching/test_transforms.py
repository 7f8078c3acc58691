"""What torch lets one do with an unpatched model: other dtypes, and tensors without values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import tome_core
from tests.models import call_unet, inputs, on_small, small
from tome_core import MergeConfig
from tome_core.attention.merged import BIAS

BALANCED, TOGETHER = on_small("balanced"), MergeConfig(ratio=0.5)

configs = pytest.mark.parametrize("config", [BALANCED, TOGETHER], ids=["balanced", "together"])


@torch.no_grad()
def run(model: nn.Module, x: torch.Tensor, text: torch.Tensor, timestep: Any = 100) -> torch.Tensor:
    return call_unet(model, x, timestep, text)


# --- dtypes and devices -----------------------------------------------------------------------------------------------


@configs
def test_the_default_dtype_and_device_change_no_bit(config: MergeConfig):
    """Programs set the device to "cuda" and leave a model on the CPU; "meta" is a device that is everywhere."""
    given, model = (*inputs(4, 1, 16, 16), torch.tensor(100)), small()
    with tome_core.patch(model, config):
        expected = run(model, *given)
    before = torch.get_default_dtype()
    try:
        for dtype in (torch.float64, torch.bfloat16):
            torch.set_default_dtype(dtype)
            with tome_core.patch(model, config):
                assert torch.equal(run(model, *given), expected)
    finally:
        torch.set_default_dtype(before)
    with torch.device("meta"), tome_core.patch(model, config):
        assert torch.equal(run(model, *given), expected)


def test_a_model_in_double_precision_merges():
    """Lengths were summed in float32, which torch refuses to narrow to."""
    model, (x, text) = small().double(), inputs(4, 1, 16, 16)
    for settings in ({"side": "kv", "metric": "keys+values"}, {"side": "kv", "refine": 1}, {"method": "cluster"}):
        with tome_core.patch(model, ratio=0.75, **settings) as handle:
            out = run(model, x.double(), text.double())
        assert out.isfinite().all() and out.dtype == torch.float64 and handle.report().merged_anything


def test_weights_that_are_stored_in_half_precision_merge_as_hard():
    """diffusers' layerwise casting: each layer casts its weights for a call, so that they do not tell what it takes."""
    model = small()
    if not hasattr(model, "enable_layerwise_casting"):
        pytest.skip("this diffusers has no layerwise casting")
    model.enable_layerwise_casting(storage_dtype=torch.float16, compute_dtype=torch.float32)
    with tome_core.patch(model, BALANCED) as handle:
        run(model, *inputs(4, 1, 16, 16))
    level = handle.report().levels[0]
    assert level.tokens == ((256, 256, 36),) and level.sized_by == {BIAS: 3}


# --- tensors without values -------------------------------------------------------------------------------------------


@configs
def test_tensors_without_values_give_a_shape_and_none_is_kept(config: MergeConfig):
    """What exporters and memory estimates send, and who asks how large an output is before anything is loaded."""
    given, fake = (*inputs(4, 1, 16, 16), torch.tensor(100)), FakeTensorMode(allow_non_fake_inputs=True)
    for is_called_before in (True, False):
        model = small()
        with tome_core.patch(model, config) as handle:
            if is_called_before:
                expected = run(model, *given)
                handle.reset_counts()
                with fake:
                    assert run(model, *map(fake.from_tensor, given)).shape == expected.shape
                assert handle.report().merged_anything or handle.report().reasons
                assert torch.equal(run(model, *given), expected)
            model.to("meta")
            on_meta = [one.to("meta") for one in given]
            for timestep in (100, on_meta[2]):
                handle.reset_counts()
                assert run(model, *on_meta[:2], timestep).shape == given[0].shape
                assert handle.report().merged_anything or handle.report().reasons
