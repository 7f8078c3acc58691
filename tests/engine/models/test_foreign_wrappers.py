"""A wrapper that somebody left on an attention, switched off, is seen through; switched on it is not."""

from __future__ import annotations

import pytest
import torch

import tome_core
from tests.least_unet import build, call
from tome_core.models import foreign_wrappers as idle

KEYS = tome_core.MergeConfig(side="kv", ratio=0.5, use_rand=False)


class _Doubling:
    """Somebody's method in place of an attention's ``forward``."""

    def __init__(self, attention) -> None:
        self.forward, self.is_on = attention.forward, False

    def __call__(self, *args, **kwargs):
        out = self.forward(*args, **kwargs)
        return out * 2 if self.is_on else out


@pytest.fixture
def wrapped(monkeypatch):
    """A UNet whose attentions have them, known to the engine."""
    monkeypatch.setattr(idle, "_WRAPPERS", {})
    idle.register_wrapper("doubling", lambda module, method: method.forward
                          if isinstance(method, _Doubling) and not method.is_on else None)  # fmt: skip
    unet = build()
    for attention in _attentions(unet):
        attention.forward = attention.doubling = _Doubling(attention)
    return unet


def _attentions(unet):
    return [one for name, one in unet.named_modules() if name.endswith("attn1")]


def _merged(unet, call=call):
    with tome_core.patch(unet, KEYS) as handle:
        return call(unet), {way for level in handle.report().levels for way in level.routes}


def test_idle_it_is_as_if_it_were_not_there_and_stays(wrapped):
    methods = [vars(one)["forward"] for one in _attentions(wrapped)]
    found, ways = _merged(wrapped)
    expected, own = _merged(build())
    assert torch.equal(found, expected) and ways == own and not torch.equal(found, call(build()))
    assert all(vars(one)["forward"] is method for one, method in zip(_attentions(wrapped), methods, strict=True))
    assert torch.equal(call(wrapped), call(build()))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_switched_on_while_the_patch_is_it_works(wrapped, compiled):
    if compiled:
        wrapped.compile(backend="eager")

    def twice(unet):
        before = call(unet)
        for one in _attentions(unet):
            one.doubling.is_on = True
        return before, call(unet)

    (before, after), _ = _merged(wrapped, twice)
    assert not torch.equal(before, after)


def test_what_is_no_method_of_the_modules_class_is_not_its_own():
    attention = _attentions(build())[0]
    assert idle.is_own(attention, None) and idle.is_own(attention, attention.forward)
    for other in (attention.__hash__, attention.extra_repr, print, object()):  # the first has no function
        assert not idle.is_own(attention, other)
