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


def assert_like_one_of(config: MergeConfig, work: Callable, simple: Callable) -> None:
    """A transform gives what simple calls give, those of the merged model or, with a reason, those of the plain one.

    work: of a model under a transform; simple: the same in eager calls.
    """
    plain, merged = of(None, simple), of(config, simple)
    torch.testing.assert_close(of(None, work), plain, **NEAR)
    model = small()
    with tome_core.patch(model, config) as handle:
        found = work(model)
        level = handle.report().levels[0]
    assert bool(level.calls_merged) != bool(level.reasons)
    torch.testing.assert_close(found, merged if level.calls_merged else plain, **NEAR)


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
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_the_default_dtype_changes_no_bit(config: MergeConfig, dtype: torch.dtype):
    """Whether it is set before patching or after it."""
    x, text = inputs(4, 1, 16, 16)
    model = small()
    with torch.no_grad():
        expected = of(config, lambda model: run(model, x, text))
        with tome_core.patch(model, config), default_dtype(dtype):
            assert torch.equal(run(model, x, text), expected)
        with default_dtype(dtype), tome_core.patch(model, config):
            assert torch.equal(run(model, x, text), expected)


@configs
def test_the_default_device_changes_no_bit(config: MergeConfig):
    """As programs set it to "cuda" and leave some model on the CPU; "meta" is one that is everywhere."""
    x, text = inputs(4, 1, 16, 16)
    timestep, model = torch.tensor(100), small()
    with torch.no_grad():
        expected = of(config, lambda model: run(model, x, text, timestep))
        with torch.device("meta"), tome_core.patch(model, config):
            assert torch.equal(run(model, x, text, timestep), expected)


@pytest.mark.parametrize("config", [
    MergeConfig(side="kv", ratio=0.75, metric="keys+values"), MergeConfig(side="kv", ratio=0.75, refine=1),
    MergeConfig(method="cluster", ratio=0.75),
], ids=["keys and values compared", "refined", "clustered"])  # fmt: skip
def test_a_model_in_double_precision_merges(config: MergeConfig):
    """Lengths were summed in float32, which torch refuses to narrow to."""
    model = small().double()
    x, text = inputs(4, 1, 16, 16)
    with torch.no_grad(), tome_core.patch(model, config) as handle:
        out = run(model, x.double(), text.double())
    assert out.isfinite().all() and out.dtype == torch.float64 and handle.report().merged_anything


@pytest.mark.parametrize("layerwise", [False, True])
def test_weights_that_are_stored_in_half_precision_merge_as_hard(layerwise: bool):
    """diffusers' layerwise casting: each layer casts its weights for a call, so that they do not tell what it takes."""
    model = small()
    if layerwise and not hasattr(model, "enable_layerwise_casting"):
        pytest.skip("this diffusers has no layerwise casting")
    if layerwise:
        model.enable_layerwise_casting(storage_dtype=torch.float16, compute_dtype=torch.float32)
    x, text = inputs(4, 1, 16, 16)
    with torch.no_grad(), tome_core.patch(model, BALANCED) as handle:
        run(model, x, text)
    level = handle.report().levels[0]
    assert level.tokens == ((256, 256, 36),) and level.sized_by == {BIAS: 3}


# --- transforms of functions -----------------------------------------------------------------------------------------


def loss(model: nn.Module, x: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
    return run(model, x, text).square().mean()


@configs
def test_the_gradient_of_a_function_is_that_of_autograd(config: MergeConfig):
    x, text = inputs(4, SEVERAL, 8, 8)

    def by_autograd(model: nn.Module) -> torch.Tensor:
        leaf = x.clone().requires_grad_()
        return torch.autograd.grad(loss(model, leaf, text), leaf)[0]

    assert_like_one_of(config, lambda model: torch.func.grad(lambda x: loss(model, x, text))(x), by_autograd)


@configs
def test_a_mapped_call_is_the_calls_of_each_sample(config: MergeConfig):
    x, text = inputs(4, SEVERAL, 8, 8)

    @torch.no_grad()
    def mapped(model: nn.Module) -> torch.Tensor:
        return torch.vmap(lambda x, text: run(model, x[None], text[None])[0])(x, text)

    @torch.no_grad()
    def one_by_one(model: nn.Module) -> torch.Tensor:
        return torch.cat([run(model, *pair) for pair in zip(x.split(1), text.split(1), strict=True)])

    assert_like_one_of(config, mapped, one_by_one)


@configs
def test_gradients_of_each_sample_are_those_of_its_own_call(config: MergeConfig):
    """What differential privacy and influence functions ask for, of one layer here."""
    x, text = inputs(4, SEVERAL, 8, 8)
    name = "conv_in.weight"

    def mapped(model: nn.Module) -> torch.Tensor:
        def of_one(weight: torch.Tensor, x: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
            return torch.func.functional_call(model, {name: weight}, (x[None], 100, text[None])).sample.square().mean()

        weight = model.get_parameter(name).detach()
        return torch.vmap(torch.func.grad(of_one), (None, 0, 0))(weight, x, text)

    def one_by_one(model: nn.Module) -> torch.Tensor:
        weight, pairs = model.get_parameter(name), zip(x.split(1), text.split(1), strict=True)
        return torch.stack([torch.autograd.grad(loss(model, *pair), weight)[0] for pair in pairs])

    assert_like_one_of(config, mapped, one_by_one)


# --- tensors without values ------------------------------------------------------------------------------------------


@configs
@pytest.mark.parametrize("timestep", [100, torch.tensor(100, device="meta")], ids=["a number", "a tensor"])
@pytest.mark.parametrize("patched_before", [False, True])
def test_a_model_on_the_meta_device_has_a_shape(config: MergeConfig, timestep: Any, patched_before: bool):
    """How large an output is, asked before anything is loaded."""
    x, text = inputs(4, 2, 16, 16)
    model = small() if patched_before else small().to("meta")
    with torch.no_grad(), tome_core.patch(model, config) as handle:
        if patched_before:
            run(model, x, text)
            model.to("meta")
            handle.reset_counts()
        assert run(model, x.to("meta"), text.to("meta"), timestep).shape == x.shape
    assert_merged_or_said(handle)


def test_fake_tensors_pass_under_a_preset():
    """What exporters and memory estimates send; the timestep is one of them, and has no value to look at."""
    x, text = inputs(4, 1, 8, 8)
    model, mode = small(), FakeTensorMode(allow_non_fake_inputs=True)
    with torch.no_grad(), tome_core.patch(model, BALANCED) as handle, mode:
        faked = [mode.from_tensor(one) for one in (x, text, torch.tensor(100))]
        assert run(model, *faked).shape == x.shape
    assert_merged_or_said(handle)
    with torch.no_grad(), tome_core.patch(model, BALANCED):
        assert torch.equal(run(model, x, text), of(BALANCED, lambda model: run(model, x, text)))
