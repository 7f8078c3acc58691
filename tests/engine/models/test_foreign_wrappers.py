"""A wrapper that somebody left on an attention, switched off, is seen through; switched on it is not."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import tome_core
from tests import least_unet
from tests.models import ModelCase, call_case, call_ldm, ldm_of_one_level
from tome_core.models import wrap

KEYS = tome_core.MergeConfig(side="kv", ratio=0.5, use_rand=False)
# an attention that computes by hand can be merged only if its own code is what runs
BY_HAND = ldm_of_one_level, partial(call_case, ModelCase("", ldm_of_one_level, call_ldm))
BY_A_FUNCTION = least_unet.build, least_unet.call


class _Doubling:
    """Somebody's method in place of an attention's ``forward``."""

    def __init__(self, attention) -> None:
        self.forward, self.is_on = attention.forward, False

    def __call__(self, *args, **kwargs):
        out = self.forward(*args, **kwargs)
        return out * 2 if self.is_on else out


@pytest.fixture
def wrapped(monkeypatch):
    """Makes a UNet whose attentions have them, known to the engine."""
    monkeypatch.setattr(wrap, "_WRAPPERS", {})
    wrap.register_wrapper("doubling", lambda module, method: method.forward
                                      if isinstance(method, _Doubling) and not method.is_on else None)  # fmt: skip

    def make(build):
        unet = build()
        for attention in _attentions(unet):
            attention.forward = attention.doubling = _Doubling(attention)
        return unet

    return make


def _attentions(unet):
    return [one for name, one in unet.named_modules() if name.endswith("attn1")]


def _merged(unet, call):
    with tome_core.patch(unet, KEYS) as handle:
        return call(unet), {way for level in handle.report().levels for way in level.sized_by}


@pytest.mark.parametrize("build, call", [BY_HAND, BY_A_FUNCTION], ids=["by hand", "by a function"])
def test_idle_it_is_as_if_it_were_not_there_and_stays(wrapped, build, call):
    unet, plain = wrapped(build), call(build())
    methods = [vars(one)["forward"] for one in _attentions(unet)]
    found, ways = _merged(unet, call)
    expected, own = _merged(build(), call)
    assert torch.equal(found, expected) and ways == own and not torch.equal(found, plain)
    assert all(vars(one)["forward"] is method for one, method in zip(_attentions(unet), methods, strict=True))
    assert torch.equal(call(unet), plain)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("build, call", [BY_HAND, BY_A_FUNCTION], ids=["by hand", "by a function"])
def test_switched_on_while_the_patch_is_it_works(wrapped, build, call, compiled):
    unet = wrapped(build)
    with tome_core.patch(unet, KEYS):
        if compiled:
            _attentions(unet)[0].compile(backend="eager")
        before = call(unet)
        for one in _attentions(unet):
            one.doubling.is_on = True
        assert not torch.equal(call(unet), before)


def test_what_is_no_method_of_the_modules_class_is_not_its_own():
    attention = _attentions(least_unet.build())[0]
    assert wrap.is_own(attention, None) and wrap.is_own(attention, attention.forward)
    for other in (attention.__hash__, attention.extra_repr, print, object()):  # the first has no function
        assert not wrap.is_own(attention, other)
