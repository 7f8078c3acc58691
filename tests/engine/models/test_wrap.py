"""Wraps hold no model alive, come back after others have taken them off, see through wrappers that are known to be
idle, and leave nothing. What stands beside them otherwise is held to its laws in `tests.beside`.
"""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import tome_core
from tests import least_unet
from tests.families import Family, some_models
from tests.models import ModelCase, call_case, call_ldm, ldm_of_one_level
from tests.thoroughness import some_quick
from tome_core import MergeConfig
from tome_core.models import adapter_of, find_models, wrap
from tome_core.models.unet import BlockSite
from tome_core.models.wrap import Wrap, wrap_of

# checkpointed `_forward`, and plain forwards of UNets and transformers
models = some_models("sgm_double", "sd15", "Flux")
QUARTER, HALF, KEYS = MergeConfig(ratio=0.25), MergeConfig(ratio=0.5), MergeConfig(side="kv", use_rand=False)
# an attention that computes by hand can be merged only if its own code is what runs
BY_HAND = Family("by hand", ldm_of_one_level, partial(call_case, ModelCase("", ldm_of_one_level, call_ldm)))
BY_FUNCTION = Family("by a function", least_unet.build, least_unet.call)


class Foreign:
    """Replaces a module's method the way accelerate and ControlNet do: save what is there, call it, put it back."""

    def __init__(self, module: nn.Module, name: str = "forward") -> None:
        self.module, self.name, self.calls = module, name, 0
        self.saved = getattr(module, name)
        setattr(module, name, self.call)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return self.saved(*args, **kwargs)

    def put_back(self) -> None:
        """accelerate and ControlNet put the saved method onto the instance even if it was the class's."""
        setattr(self.module, self.name, self.saved)


def sites_of(model: Any) -> list[tuple[nn.Module, str]]:
    """All that a patch may wrap, and so what others may wrap as well: module and name of the method."""
    (network,) = find_models(model)
    adapter = adapter_of(network)
    levels = set(range(len(adapter.downsamples)))

    def site(kind: type, module: nn.Module, *_: Any) -> tuple[nn.Module, str]:
        return module, "_forward" if kind is BlockSite and hasattr(module, "_forward") else "forward"

    return list(adapter.wraps(network, levels, levels, site))


def wrap_everything(model: Any) -> list[Foreign]:
    return [Foreign(*site) for site in sites_of(model)]


# --- whole models -----------------------------------------------------------------------------------------------------


@models
def test_a_wrap_that_comes_and_goes_at_every_picture_builds_no_chain(one: Family):
    model = one.build()
    plain = one.call(model)
    tome_core.apply_patch(model)
    merged = one.call(model)
    tome_core.remove_patch(model)
    for _ in range(20):
        tome_core.apply_patch(model)
        foreign = wrap_everything(model)
        tome_core.remove_patch(model)
        for each in reversed(foreign):
            each.put_back()
    assert torch.equal(one.call(model), plain)
    tome_core.apply_patch(model)
    assert torch.equal(one.call(model), merged)
    depth, forward = 0, vars(find_models(model)[0])["forward"]
    while forward is not None:
        depth, forward = depth + 1, getattr(getattr(forward, "__self__", forward), "beneath", None)
    assert 1 <= depth <= 2


@models
def test_an_old_wrap_put_back_over_a_new_patch_is_harmless(one: Family):
    """ControlNet saves a block's method once and puts that back at some later picture, whatever was patched since."""
    model = one.build()
    plain = one.call(model)
    with tome_core.patch(model, QUARTER):
        saved = [(module, name, getattr(module, name)) for module, name in sites_of(model)]
    second = tome_core.patch(model, HALF)
    merged = one.call(model)
    for module, name, method in saved:
        setattr(module, name, method)
    assert torch.equal(one.call(model), merged)  # a model's wraps are the same ones for every patch
    second.install()
    assert torch.equal(one.call(model), merged)
    second.remove()
    assert torch.equal(one.call(model), plain)


@models
def test_a_patch_taken_back_over_another_programs_wrappers_merges_again(one: Family):
    model = one.build()
    outer = tome_core.patch(model, HALF)
    merged = one.call(model)
    with tome_core.patch(model, QUARTER):
        foreign = wrap_everything(model)
    outer.reset_counts()
    assert torch.equal(one.call(model), merged) and not outer.report().reasons
    assert all(each.calls == 1 for each in foreign)


@models
def test_neither_a_handle_nor_the_engine_keeps_a_model_alive(one: Family):
    """A name in a notebook, on a machine whose memory holds one model."""
    for is_on in (True, False):
        model = one.build()
        handle = tome_core.patch(model)
        wrap_everything(model)
        handle = tome_core.patch(model, KEYS)  # which has wraps of other kinds, over those of others
        one.call(model)
        if not is_on:
            handle.remove()
        inner = find_models(model)[0]
        last = [module for module in inner.modules() if hasattr(module, "to_q")][-1]
        known = [weakref.ref(one) for one in (model, inner, last, last.to_q.weight)]
        del model, inner, last
        gc.collect()
        assert [one() for one in known] == [None] * 4
        assert handle.model is None and isinstance(handle.report(), tome_core.Report)


@models
def test_a_pickled_model_with_wrappers_beneath_ours_calls_them(one: Family):
    """It came to modules by our wraps, and a wrapper's saved method was then the wrapper itself."""
    model = one.build()
    plain = one.call(model)
    foreign = wrap_everything(model)
    tome_core.apply_patch(model)
    twin = pickle.loads(pickle.dumps(model))
    assert torch.equal(one.call(twin), plain) and not any(each.calls for each in foreign)
    methods = [vars(module)[name] for module, name in sites_of(twin)]
    theirs = [(method if wrap_of(method) is None else wrap_of(method).beneath).__self__ for method in methods]
    assert len(theirs) == len(foreign) and all(each.calls == 1 for each in theirs)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_a_copy_with_a_wrapper_that_keeps_a_resting_wrap_runs_its_own_weights(copied):
    layer = nn.Linear(2, 2)
    ours = Wrap(layer).install()
    foreign = Foreign(layer)
    layer.forward = foreign.saved  # it looks elsewhere for a moment
    ours.uninstall()
    layer.forward = foreign.call
    twin = copied(layer)
    with torch.no_grad():
        layer.weight.zero_()
        layer.bias.zero_()
        assert twin(torch.ones(1, 2)).any() and not layer(torch.ones(1, 2)).any()


# --- wrappers that are known to be idle -------------------------------------------------------------------------------


class _Doubling:
    """Another program's method in place of an attention's ``forward``."""

    def __init__(self, attention: nn.Module) -> None:
        self.forward, self.is_on = attention.forward, False

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.forward(*args, **kwargs) * (2 if self.is_on else 1)


def _beneath(module: nn.Module, method: Any) -> Any:
    return method.forward if isinstance(method, _Doubling) and not method.is_on else None


@pytest.mark.parametrize("one", [BY_HAND, BY_FUNCTION], ids=lambda one: one.name)
@pytest.mark.parametrize("is_compiled", some_quick([False, True]), ids=["eager", "compiled"])
def test_an_idle_wrapper_is_as_if_it_were_not_there_and_switched_on_it_works(one: Family, is_compiled, monkeypatch):
    monkeypatch.setattr(wrap, "_WRAPPERS", {})
    wrap.register_wrapper("doubling", _beneath)
    with tome_core.patch(alone := one.build(), KEYS) as wanted:
        merged = one.call(alone)
    unet = one.build()
    attentions = [module for path, module in unet.named_modules() if path.endswith("attn1")]
    for attention in attentions:
        attention.forward = _Doubling(attention)
    doubling = [attention.forward for attention in attentions]
    with tome_core.patch(unet, KEYS) as handle:
        assert torch.equal(one.call(unet), merged)
        assert handle.report().levels[0].sized_by == wanted.report().levels[0].sized_by
        if is_compiled:
            attentions[0].compile(backend="eager")
        for each in doubling:
            each.is_on = True
        assert not torch.equal(one.call(unet), merged)
    assert [vars(attention)["forward"] for attention in attentions] == doubling
