"""What torch lets one do with an unpatched model: other dtypes, transforms, tensors without values.

Under a transform, and for tensors without values, blocks may be left unmerged; then the report says why.
"""

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
NAME = "conv_in.weight"

configs = pytest.mark.parametrize("config", [BALANCED, TOGETHER], ids=["balanced", "together"])
# torch says so of its own kernels
pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")


def run(model: nn.Module, x: torch.Tensor, text: torch.Tensor, timestep: Any = 100) -> torch.Tensor:
    return call_unet(model, x, timestep, text)


# --- dtypes and devices -----------------------------------------------------------------------------------------------


@configs
@torch.no_grad()
def test_the_default_dtype_and_device_change_no_bit(config: MergeConfig):
    """Set before patching or after it. Programs set the device to "cuda" and leave a model on the CPU; "meta" is a
    device that is everywhere.
    """
    given, model = (*inputs(4, 1, 16, 16), torch.tensor(100)), small()
    with tome_core.patch(model, config):
        expected = run(model, *given)
    before = torch.get_default_dtype()
    for dtype in (torch.float64, torch.bfloat16):
        handle = tome_core.patch(model, config)
        try:
            torch.set_default_dtype(dtype)
            assert torch.equal(run(model, *given), expected)
            handle.remove()
            with tome_core.patch(model, config):
                assert torch.equal(run(model, *given), expected)
        finally:
            torch.set_default_dtype(before)
    with torch.device("meta"), tome_core.patch(model, config):
        assert torch.equal(run(model, *given), expected)


@torch.no_grad()
def test_a_model_in_double_precision_merges():
    """Lengths were summed in float32, which torch refuses to narrow to."""
    model, (x, text) = small().double(), inputs(4, 1, 16, 16)
    for settings in ({"side": "kv", "metric": "keys+values"}, {"side": "kv", "refine": 1}, {"method": "cluster"}):
        with tome_core.patch(model, ratio=0.75, **settings) as handle:
            out = run(model, x.double(), text.double())
        assert out.isfinite().all() and out.dtype == torch.float64 and handle.report().merged_anything


@torch.no_grad()
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


# --- transforms of functions ------------------------------------------------------------------------------------------


def picture(model: nn.Module, weight: torch.Tensor, x: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
    """Of one sample, with another weight in the first layer."""
    return torch.func.functional_call(model, {NAME: weight}, (x[None], 100, text[None])).sample


def loss(*given: Any) -> torch.Tensor:
    return picture(*given).square().mean()


@configs
@pytest.mark.parametrize("work", [picture, torch.func.grad(loss, argnums=1)], ids=["picture", "gradient"])
def test_samples_that_are_mapped_over_give_what_eager_calls_give(config: MergeConfig, work: Any):
    """Of the merged model or, with a reason, of the plain one. Gradients of samples are what differential privacy and
    influence functions ask for.
    """
    model, (x, text) = small(), inputs(4, 2, 8, 8)
    weight = model.get_parameter(NAME).detach()

    def by_calls() -> torch.Tensor:
        if work is picture:
            return torch.stack([work(model, weight, *pair).detach() for pair in zip(x, text, strict=True)])
        weights = [weight.clone().requires_grad_() for _ in x]
        losses = [loss(model, *of_one) for of_one in zip(weights, x, text, strict=True)]
        return torch.stack(torch.autograd.grad(sum(losses), weights))

    plain = by_calls()
    with tome_core.patch(model, config) as handle:
        merged = by_calls()
        handle.reset_counts()
        found = torch.vmap(lambda *of_one: work(model, weight, *of_one))(x, text)
        level = handle.report().levels[0]
    assert bool(level.calls_merged) != bool(level.reasons)
    expected = merged if level.calls_merged else plain
    torch.testing.assert_close(found.detach(), expected, rtol=1e-3, atol=1e-4)  # a transform has kernels of its own


# --- tensors without values -------------------------------------------------------------------------------------------


@configs
@torch.no_grad()
def test_a_model_on_the_meta_device_has_a_shape(config: MergeConfig):
    """How large an output is, asked before anything is loaded, or after a call with values."""
    x, text = inputs(4, 2, 16, 16)
    for is_called_before in (True, False):
        model = small()
        with tome_core.patch(model, config) as handle:
            if is_called_before:
                run(model, x, text)
            model.to("meta")
            for timestep in (100, torch.tensor(100, device="meta")):
                handle.reset_counts()
                assert run(model, x.to("meta"), text.to("meta"), timestep).shape == x.shape
                assert handle.report().merged_anything or handle.report().reasons


@torch.no_grad()
def test_fake_tensors_pass_under_a_preset():
    """What exporters and memory estimates send; the timestep is one of them, and has no value to look at."""
    x, text = inputs(4, 1, 8, 8)
    model, mode = small(), FakeTensorMode(allow_non_fake_inputs=True)
    with tome_core.patch(model, BALANCED) as handle:
        expected = run(model, x, text)
        handle.reset_counts()
        with mode:
            faked = [mode.from_tensor(tensor) for tensor in (x, text, torch.tensor(100))]
            assert run(model, *faked).shape == x.shape
        assert handle.report().merged_anything or handle.report().reasons
        assert torch.equal(run(model, x, text), expected), "no fake one is kept"
