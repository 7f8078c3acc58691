"""All wraps on a model: they hold no model alive, come back where others have taken them off, and leave nothing."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import tome_core
from tests.families import Family, some_models
from tests.foreign_wrappers import Foreign, sites_of, wrap_everything
from tests.models import BY_NAME, ModelCase, call_case
from tome_core import MergeConfig
from tome_core.models import find_models
from tome_core.models.wrap import Wrap, drop_remains, wrap_of

of_either_kind = some_models("sd15", "ldm_wrapped", "Flux", "Wan")
CASE = BY_NAME["sd15"]
few_families = pytest.mark.parametrize("case", [CASE, BY_NAME["sgm_double"]], ids=lambda case: case.name)


# --- who holds what ---------------------------------------------------------------------------------------------------


def patched_and_still_on(model: nn.Module) -> Any:
    return tome_core.patch(model, MergeConfig())


def patched_and_removed(model: nn.Module) -> Any:
    with tome_core.patch(model, MergeConfig()) as handle:
        return handle


def over_wrappers_of_others(model: nn.Module) -> Any:
    """The second patch has wraps of other kinds."""
    wrap_everything(model)
    tome_core.patch(model, MergeConfig(side="kv"))
    return patched_and_removed(tome_core.apply_patch(model))


def under_wrappers_of_others(model: nn.Module) -> Any:
    with tome_core.patch(model, MergeConfig()) as handle:
        wrap_everything(model)
    return handle


@of_either_kind
@pytest.mark.parametrize("work", [
    patched_and_still_on, patched_and_removed, over_wrappers_of_others, under_wrappers_of_others,
], ids=lambda work: work.__name__)  # fmt: skip
def test_neither_a_handle_nor_the_engine_keeps_a_model_alive(one: Family, work):
    """A name in a notebook, on a machine whose memory holds one model."""
    model = one.build()
    handle = work(model)
    one.call(model)
    inner = find_models(model)[0]
    last = [module for module in inner.modules() if hasattr(module, "to_q")][-1]
    known = [weakref.ref(one) for one in (model, inner, last, last.to_q.weight)]
    del model, inner, last
    gc.collect()
    assert [one() for one in known] == [None] * 4
    assert handle.model is None and isinstance(handle.report(), tome_core.Report)
    handle.remove()


# --- what others take off ---------------------------------------------------------------------------------------------


@few_families
def test_a_pickled_model_with_wrappers_beneath_ours_calls_them(case: ModelCase):
    """It came to modules by our wraps, and a wrapper's saved method was then the wrapper itself."""
    model = case.build()
    plain = call_case(case, model)
    foreign = wrap_everything(model)
    tome_core.apply_patch(model)
    twin = pickle.loads(pickle.dumps(model))
    assert torch.equal(call_case(case, twin), plain) and not any(one.calls for one in foreign)
    found = [vars(module)[name] for module, name in sites_of(twin)]
    theirs = [(method if wrap_of(method) is None else wrap_of(method).beneath).__self__ for method in found]
    assert len(theirs) == len(foreign) and all(one.calls == 1 for one in theirs)


def wrap_kept_by_another(layer: nn.Module) -> tuple[Wrap, Foreign]:
    """Our wrap is off and rests, and a wrapper beside it has kept it as what it found."""
    wrap = Wrap(layer).install()
    foreign = Foreign(layer)
    vars(layer)["forward"] = foreign.saved  # it looks elsewhere for a moment
    wrap.uninstall()
    return wrap, foreign


def test_a_wrap_that_rests_and_is_put_back_by_another_is_taken_off_and_serves_again():
    layer = nn.Linear(2, 2)
    wrap, foreign = wrap_kept_by_another(layer)
    foreign.put_back()
    drop_remains(layer)
    assert "forward" not in vars(layer)
    assert wrap.install() is wrap and wrap.target is layer and wrap.is_on_top()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_a_copy_with_a_wrapper_that_keeps_a_resting_wrap_runs_its_own_weights(copied):
    layer = nn.Linear(2, 2)
    _, foreign = wrap_kept_by_another(layer)
    layer.forward = foreign._call
    twin = copied(layer)
    with torch.no_grad():
        layer.weight.zero_()
        layer.bias.zero_()
        assert twin(torch.ones(1, 2)).any() and not layer(torch.ones(1, 2)).any()


def test_a_wrap_that_was_put_back_over_another_program_is_of_the_same_kind():
    """Else it would pass calls through, and merge nothing any more."""

    class Twice(Wrap):
        def run(self, x):
            return 2 * self.original(x)

    layer, x = nn.Linear(2, 2), torch.ones(1, 2)
    wrap = Twice(layer).install()
    foreign = Foreign(layer)
    again = wrap.install()
    assert again is not wrap and torch.equal(layer(x), 2 * type(layer).forward(layer, x)) and foreign.calls == 1
