"""What random stackings have found (`tests.random_stackings`), each in its smallest form."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import tome_core
from tests.foreign_wrappers import Foreign, unwrap, wrap_everything
from tests.models import BY_NAME, call_case, inputs, sd15
from tests.random_stackings.layers import Fussy
from tests.random_stackings.sessions import drop_own_methods
from tests.traces import traces
from tome_core import MergeConfig
from tome_core.models.unet_blocks import find_blocks
from tome_core.models.wrap import Wrap, drop_remains

few_families = pytest.mark.parametrize("case", [BY_NAME["sd15"], BY_NAME["sgm_double"]], ids=lambda case: case.name)


@pytest.mark.parametrize("config", [
    MergeConfig(side="kv", ratio=0.75, metric="keys+values"),
    MergeConfig(side="kv", ratio=0.75, refine=1),
    MergeConfig(method="cluster", ratio=0.75),
], ids=["keys and values compared", "refined", "clustered"])  # fmt: skip
def test_a_model_in_double_precision_merges(config):
    """Lengths were summed in float32, which torch refuses to narrow to."""
    model = sd15().double()
    x, text = inputs(4, 2, 16, 16)
    with torch.no_grad(), tome_core.patch(model, config) as handle:
        out = model(x.double(), 500, text.double()).sample
    assert out.isfinite().all() and out.dtype == torch.float64 and handle.report().merged_anything


def test_a_processor_that_refuses_merged_tokens_is_left_whole_in_tomesds_way_too():
    model = sd15()
    for place in find_blocks(model):
        place.block.attn1.processor = Fussy()
    plain = call_case(BY_NAME["sd15"], model)
    tome_core.apply_patch(model, ratio=0.3)
    assert torch.equal(call_case(BY_NAME["sd15"], model), plain)
    assert "refuses merged tokens" in str(tome_core.report(model))


def test_a_processor_that_refuses_merged_tokens_trains_under_gradient_checkpointing():
    """The recomputation did not ask it again, and had fewer tensors to save than the forward."""
    model = sd15().train()
    model.enable_gradient_checkpointing()
    for place in find_blocks(model):
        place.block.attn1.processor = Fussy()
    tome_core.apply_patch(model, ratio=0.3)
    x, text = inputs(4, 2, 16, 16)
    model(x.requires_grad_(), 500, text).sample.square().sum().backward()
    assert x.grad.isfinite().all() and x.grad.any()


@few_families
def test_nothing_stays_where_somebody_lay_above_and_put_back_what_was_there(case):
    model = case.build()
    before = traces(model)
    tome_core.apply_patch(model)
    foreign = wrap_everything(model)
    handle = tome_core.patch(model, ratio=0.25)
    call_case(case, model)
    handle.remove()
    unwrap(foreign)
    tome_core.remove_patch(model)
    drop_own_methods(model)
    assert traces(model) == before


@few_families
def test_a_pickled_model_with_wrappers_beneath_ours_calls_them(case):
    """It came to modules by our wraps, and a wrapper's saved method was then the wrapper itself."""
    model = case.build()
    foreign = wrap_everything(model)
    tome_core.apply_patch(model)
    merged = call_case(case, model)
    twin = pickle.loads(pickle.dumps(model))
    assert torch.equal(call_case(case, twin), merged) and all(one.calls == 1 for one in foreign)
    tome_core.remove_patch(twin)
    assert not torch.equal(call_case(case, twin), merged)


def resting_beneath_a_wrapper() -> tuple[torch.nn.Module, Foreign]:
    """A layer on which somebody's wrapper has kept a wrap of ours that is off and waits for the next patch."""
    layer = torch.nn.Linear(2, 2)
    wrap = Wrap(layer).install()
    foreign = Foreign(layer)
    vars(layer)["forward"] = foreign.saved  # it looks elsewhere for a moment
    wrap.uninstall()
    wrap.rest()
    return layer, foreign


def test_a_wrap_that_rests_and_was_put_back_by_somebody_is_taken_off():
    layer, foreign = resting_beneath_a_wrapper()
    foreign.put_back()
    drop_remains(layer)
    assert "forward" not in vars(layer)
    wrap = foreign.saved.__self__ if hasattr(foreign.saved, "__self__") else foreign.saved
    assert wrap.wake() and wrap.target is layer


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_a_copy_with_a_wrapper_that_keeps_a_resting_wrap_runs_its_own_weights(copied):
    layer, foreign = resting_beneath_a_wrapper()
    layer.forward = foreign._call
    twin = copied(layer)
    with torch.no_grad():
        layer.weight.zero_()
        layer.bias.zero_()
        assert twin(torch.ones(1, 2)).any() and not layer(torch.ones(1, 2)).any()
