"""Wraps come back after others have taken them off, build no chain, and see through wrappers known to be idle."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import tome_core
from tests.small_models.families import some_models
from tests.small_models.least_unet import Least
from tests.small_models.unets import Family, call_ldm, ldm_of_one_level
from tome_core import MergeConfig
from tome_core.models import find_models, wrap
from tome_core.models.wrap_set import wraps_on

# checkpointed `_forward`, and plain forwards of UNets and transformers
models = some_models("sgm_double", "sd15", "Flux")
QUARTER, HALF, KEYS = MergeConfig(ratio=0.25), MergeConfig(ratio=0.5), MergeConfig(side="kv", use_rand=False)


def methods_of(model: Any) -> list[tuple[nn.Module, str, Any]]:
    """The methods that the patch has wrapped, and others may wrap too: module, name of the method, and the method."""
    (network,) = find_models(model)
    return [(wrap.target, wrap.name, getattr(wrap.target, wrap.name)) for wrap in wraps_on(network).wraps]


def put_back(methods: list[tuple[nn.Module, str, Any]]) -> None:
    """Put methods back on the instances, even methods of the class, as accelerate and ControlNet do."""
    for module, name, method in methods:
        setattr(module, name, method)


def wrap_everything(model: Any) -> None:
    """Save each method and replace it by one that calls it, as accelerate and ControlNet do."""
    put_back([(module, name, partial(method)) for module, name, method in methods_of(model)])


@models
def test_a_wrap_that_comes_and_goes_at_every_picture_builds_no_chain(family: Family):
    model = family.build()
    for _ in range(5):
        tome_core.apply_patch(model)
        merged, saved = family.call(model), methods_of(model)
        wrap_everything(model)
        tome_core.remove_patch(model)
        put_back(saved)
    tome_core.apply_patch(model)
    assert torch.equal(family.call(model), merged)
    depth, forward = 0, vars(find_models(model)[0])["forward"]
    while forward is not None:
        depth, forward = depth + 1, getattr(getattr(forward, "__self__", forward), "beneath", None)
    assert 1 <= depth <= 2


@models
def test_an_old_wrap_put_back_over_a_new_patch_is_harmless(family: Family):
    """ControlNet saves a block's method once and puts it back at a later picture, even if a patch came between."""
    model = family.build()
    plain = family.call(model)
    with tome_core.patch(model, QUARTER):
        saved = methods_of(model)
    second = tome_core.patch(model, HALF)
    merged = family.call(model)
    put_back(saved)
    assert torch.equal(family.call(model), merged)  # a model's wraps are the same ones for every patch
    second.install()
    assert torch.equal(family.call(model), merged)
    second.remove()
    assert torch.equal(family.call(model), plain)


@models
def test_a_patch_taken_back_over_another_programs_wrappers_merges_again(family: Family):
    outer = tome_core.patch(model := family.build(), HALF)
    merged = family.call(model)
    with tome_core.patch(model, QUARTER):
        wrap_everything(model)
    outer.reset_counts()
    assert torch.equal(family.call(model), merged) and not outer.report().reasons
    wrap_everything(model)
    outer.install()
    assert torch.equal(family.call(model), merged) and not outer.report().reasons


class _Doubling:
    """Another program's method in place of an attention's ``forward``."""

    def __init__(self, attention: nn.Module) -> None:
        self.forward, self.is_on = attention.forward, False

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.forward(*args, **kwargs) * (2 if self.is_on else 1)


def _beneath(module: nn.Module, method: Any) -> Any:
    return method.forward if isinstance(method, _Doubling) and not method.is_on else None


# an attention that computes by hand can be merged only if its own code is what runs
@pytest.mark.parametrize("family", [Family("by hand", ldm_of_one_level, call_ldm), Least("by a function", depth=2)],
                         ids=lambda family: family.name)  # fmt: skip
def test_an_idle_wrapper_is_as_if_it_were_not_there_and_switched_on_it_works(family: Family, monkeypatch):
    monkeypatch.setattr(wrap, "_WRAPPERS", {})
    wrap.register_wrapper("doubling", _beneath)
    with tome_core.patch(alone := family.build(), KEYS) as wanted:
        merged = family.call(alone)
    unet = family.build()
    attentions = [module for path, module in unet.named_modules() if path.endswith("attn1")]
    for attention in attentions:
        attention.forward = _Doubling(attention)
    doubling = [attention.forward for attention in attentions]
    with tome_core.patch(unet, KEYS) as handle:
        assert torch.equal(family.call(unet), merged)
        assert handle.report().levels[0].sized_by == wanted.report().levels[0].sized_by
        for each in doubling:
            each.is_on = True
        assert not torch.equal(family.call(unet), merged)
    assert [vars(attention)["forward"] for attention in attentions] == doubling
