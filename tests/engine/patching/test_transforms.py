"""What torch lets one do with an unpatched model: other dtypes, transforms, tensors without values.

Under a transform, and where there is nothing to look at, blocks may be left unmerged; then the report says why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import tome_core
from tests.models import call_unet, inputs, on_small, small
from tome_core import MergeConfig
from tome_core.attention.merged import BIAS

BALANCED = on_small("balanced")
CONFIGS = {"balanced": BALANCED, "together": MergeConfig(ratio=0.5)}
NEAR = {"rtol": 1e-3, "atol": 1e-4}  # a transform has kernels of its own
SEVERAL = 2

configs = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
# torch says so of its own kernels
pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")


def run(model: nn.Module, x: torch.Tensor, text: torch.Tensor, timestep: Any = 100) -> torch.Tensor:
    return call_unet(model, x, timestep, text)


def of(config: MergeConfig | None, work: Callable[[nn.Module], Any]) -> Any:
    """What the work gives with a fresh model; None: without a patch."""
    model = small()
    with tome_core.patch(model, config) if config else nullcontext():
        return work(model)


def assert_merged_or_said(handle: Any) -> None:
    """Every call of a block is in the report, as merged or with a reason."""
    level = handle.report().levels[0]
    assert level.calls_merged or level.reasons


# --- dtypes and devices -----------------------------------------------------------------------------------------------


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@configs
def test_the_default_dtype_and_device_change_no_bit(config: MergeConfig):
    """Whether they are set before patching or after it. Programs set the device to "cuda" and leave a model on the CPU;
    "meta" is a device that is everywhere.
    """
    (x, text), timestep, model = inputs(4, 1, 16, 16), torch.tensor(100), small()
    with torch.no_grad():
        expected = of(config, lambda model: run(model, x, text, timestep))
        for dtype in (torch.float64, torch.bfloat16):
            with tome_core.patch(model, config), default_dtype(dtype):
                assert torch.equal(run(model, x, text, timestep), expected)
            with default_dtype(dtype), tome_core.patch(model, config):
                assert torch.equal(run(model, x, text, timestep), expected)
        with torch.device("meta"), tome_core.patch(model, config):
            assert torch.equal(run(model, x, text, timestep), expected)


def test_a_model_in_double_precision_merges():
    """Lengths were summed in float32, which torch refuses to narrow to."""
    model, (x, text) = small().double(), inputs(4, 1, 16, 16)
    for settings in ({"side": "kv", "metric": "keys+values"}, {"side": "kv", "refine": 1}, {"method": "cluster"}):
        with torch.no_grad(), tome_core.patch(model, ratio=0.75, **settings) as handle:
            out = run(model, x.double(), text.double())
        assert out.isfinite().all() and out.dtype == torch.float64 and handle.report().merged_anything


def test_weights_that_are_stored_in_half_precision_merge_as_hard():
    """diffusers' layerwise casting: each layer casts its weights for a call, so that they do not tell what it takes."""
    model, (x, text) = small(), inputs(4, 1, 16, 16)
    if not hasattr(model, "enable_layerwise_casting"):
        pytest.skip("this diffusers has no layerwise casting")
    model.enable_layerwise_casting(storage_dtype=torch.float16, compute_dtype=torch.float32)
    with torch.no_grad(), tome_core.patch(model, BALANCED) as handle:
        run(model, x, text)
    level = handle.report().levels[0]
    assert level.tokens == ((256, 256, 36),) and level.sized_by == {BIAS: 3}


# --- transforms of functions: each of a model gives what eager calls give, in the same order -------------------------

NAME = "conv_in.weight"


def loss(model: nn.Module, x: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
    return run(model, x, text).square().mean()


def in_pairs(x: torch.Tensor, text: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    return zip(x.split(1), text.split(1), strict=True)


@torch.no_grad()
def mapped(model, x, text):
    return torch.vmap(lambda x, text: run(model, x[None], text[None])[0])(x, text)


@torch.no_grad()
def one_by_one(model, x, text):
    return torch.cat([run(model, *pair) for pair in in_pairs(x, text)])


def gradients_of_samples(model, x, text):
    """What differential privacy and influence functions ask for, of one layer here."""

    def of_one(weight: torch.Tensor, x: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, {NAME: weight}, (x[None], 100, text[None])).sample.square().mean()

    return torch.vmap(torch.func.grad(of_one), (None, 0, 0))(model.get_parameter(NAME).detach(), x, text)


def gradients_one_by_one(model, x, text):
    weight = model.get_parameter(NAME)
    return torch.stack([torch.autograd.grad(loss(model, *pair), weight)[0] for pair in in_pairs(x, text)])


@configs
@pytest.mark.parametrize(
    "transform, simple", [(mapped, one_by_one), (gradients_of_samples, gradients_one_by_one)],
    ids=lambda it: it.__name__,
)  # fmt: skip
def test_a_transform_gives_what_eager_calls_give(config: MergeConfig, transform: Callable, simple: Callable):
    """Those of the merged model or, with a reason, those of the plain one."""
    given = inputs(4, SEVERAL, 8, 8)
    plain, merged = (of(patched, lambda model: simple(model, *given)) for patched in (None, config))
    torch.testing.assert_close(of(None, lambda model: transform(model, *given)), plain, **NEAR)
    model = small()
    with tome_core.patch(model, config) as handle:
        found = transform(model, *given)
        level = handle.report().levels[0]
    assert bool(level.calls_merged) != bool(level.reasons)
    torch.testing.assert_close(found, merged if level.calls_merged else plain, **NEAR)


# --- tensors without values -------------------------------------------------------------------------------------------


@configs
def test_a_model_on_the_meta_device_has_a_shape(config: MergeConfig):
    """How large an output is, asked before anything is loaded, or after a call with values."""
    x, text = inputs(4, 2, 16, 16)
    for is_called_before in (True, False):
        model = small()
        with torch.no_grad(), tome_core.patch(model, config) as handle:
            if is_called_before:
                run(model, x, text)
            model.to("meta")
            for timestep in (100, torch.tensor(100, device="meta")):
                handle.reset_counts()
                assert run(model, x.to("meta"), text.to("meta"), timestep).shape == x.shape
                assert_merged_or_said(handle)


def test_fake_tensors_pass_under_a_preset():
    """What exporters and memory estimates send; the timestep is one of them, and has no value to look at."""
    x, text = inputs(4, 1, 8, 8)
    model, mode = small(), FakeTensorMode(allow_non_fake_inputs=True)
    with torch.no_grad(), tome_core.patch(model, BALANCED) as handle, mode:
        faked = [mode.from_tensor(tensor) for tensor in (x, text, torch.tensor(100))]
        assert run(model, *faked).shape == x.shape
    assert_merged_or_said(handle)
    with torch.no_grad(), tome_core.patch(model, BALANCED):
        assert torch.equal(run(model, x, text), of(BALANCED, lambda model: run(model, x, text)))
