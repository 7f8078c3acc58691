"""Attentions of diffusers that the engine does not know merge queries, keys and values together, and it says so.

Unknown are processors that do more than attend, and classes that are not diffusers' own.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
from diffusers.models.attention_processor import Attention, AttnProcessor2_0
from torch import nn

import tome_core
from tests.conformance import assert_all_together, routes_of, self_attentions, watched
from tests.conformance_diffusers import HEADS, KV, STRONG, WIDTH, attention, batch_for, call, made, model_with, own, put
from tests.diffusers_processors import KNOWN, TOGETHER, of_diffusers
from tests.models import fixed
from tome_core.attention import known_of, name_of

pytestmark = pytest.mark.usefixtures("plain_xformers")
UNUSUAL = {"group_norm": fixed(nn.GroupNorm(4, WIDTH)), "residual_connection": True, "rescale_output_factor": 2.0}


@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.parametrize("what", UNUSUAL)
def test_an_attention_that_does_more_than_attend_is_merged_as_an_unknown_one(name, what):
    model = model_with(name)
    for module in self_attentions(model).values():
        setattr(module, what, UNUSUAL[what])
        assert known_of(module).problem(module, {})
    plain = copy.deepcopy(model)
    with tome_core.patch(model, KV) as handle, watched(model) as seen:
        call(model)
    assert_all_together(own, plain, seen)
    assert routes_of(handle) and all("together" in route and "because" in route for route in routes_of(handle))


@pytest.mark.parametrize("name", KNOWN)
def test_an_attention_with_a_norm_of_pictures_is_not_taken_apart(name):
    """It takes nothing but tokens in 4-D, so there is no UNet to try it in."""
    module = attention(made(name))
    assert known_of(module).problem(module, {}) is None
    module.spatial_norm = nn.Identity()
    assert known_of(module).problem(module, {})


@pytest.mark.parametrize("name", TOGETHER)
def test_an_unknown_attention_gives_what_it_gives_for_merged_tokens(name):
    model = model_with(name)
    plain = copy.deepcopy(model)
    with tome_core.patch(model, STRONG) as handle, watched(model) as seen:
        call(model, batch_for(name))
    assert len(seen) == 3
    assert_all_together(own, plain, seen)
    assert_tells_of(handle, name)


def assert_tells_of(handle: Any, name: str) -> None:
    routes = routes_of(handle)
    assert routes and all("together" in route and name in route for route in routes), handle.report()


@pytest.mark.parametrize("name", TOGETHER)
@pytest.mark.parametrize(("config", "size"), [("balanced", 32), (STRONG, 8)], ids=["balanced", "strong"])
def test_an_unknown_attention_is_called_as_often_as_without_a_patch(name, config, size, monkeypatch):
    """At a size at which the preset merges."""
    model = model_with(name)
    kind, calls = of_diffusers(name), []
    before = kind.__call__

    @functools.wraps(before)
    def counted(self, attn, hidden_states, *args, **kwargs):
        calls.append(hidden_states.shape[1])
        return before(self, attn, hidden_states, *args, **kwargs)

    monkeypatch.setattr(kind, "__call__", counted)
    with tome_core.patch(model, config) as handle:
        call(model, batch_for(name), size, timestep=900)
    assert len(calls) == 3 and all(size**2 > count >= size**2 // 2 for count in calls)
    assert_tells_of(handle, name)


# --- whose class it is ----------------------------------------------------------------------------------------------


def derived_from(kind: type, name: str, **body: Any) -> type:
    return type(name, (kind,), {"__module__": __name__, **body})


def users_own() -> dict[str, type]:
    """Classes that differ from diffusers' AttnProcessor2_0 in ever less."""

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, temb=None):
        return AttnProcessor2_0.__call__(self, attn, hidden_states, encoder_hidden_states) * 0.5

    return {
        "its_own": derived_from(object, "Mine", __call__=__call__),
        "derived": derived_from(AttnProcessor2_0, "Mine", __call__=__call__),
        "derived_and_the_same": derived_from(AttnProcessor2_0, "Mine"),
        "derived_and_of_the_same_name": derived_from(AttnProcessor2_0, "AttnProcessor2_0", __call__=__call__),
        "of_the_same_name": derived_from(object, "AttnProcessor2_0", __call__=__call__),
    }


@pytest.mark.parametrize("which", users_own())
def test_a_processor_of_a_users_own_class_is_unknown(which):
    kind, model = users_own()[which], model_with(None)
    for module in self_attentions(model).values():
        module.set_processor(kind())
        assert known_of(module) is None
        assert name_of(module) == kind.__name__
    plain = copy.deepcopy(model)
    with tome_core.patch(model, KV) as handle, watched(model) as seen:
        call(model)
    assert_all_together(own, plain, seen)
    assert_tells_of(handle, kind.__name__)


@pytest.mark.parametrize("name", KNOWN)
def test_a_class_of_diffusers_whose_call_somebody_replaced_is_unknown(name, monkeypatch):
    module = attention(made(name))
    kind = type(module.processor)
    before = kind.__call__
    assert known_of(module) is not None
    monkeypatch.setattr(kind, "__call__", lambda self, *args, **kwargs: before(self, *args, **kwargs) * 2)
    assert known_of(module) is None


def test_an_attention_with_a_forward_of_its_own_is_unknown():
    class Mine(Attention):
        def forward(self, hidden_states, encoder_hidden_states=None, attention_mask=None, **more):
            return super().forward(hidden_states, encoder_hidden_states, attention_mask, **more) * 2

    assert known_of(Mine(WIDTH, heads=HEADS, dim_head=WIDTH // HEADS)) is None


@pytest.mark.parametrize("name", KNOWN)
def test_the_processor_that_is_in_force_at_a_call_decides(name):
    """Hosts change them between steps."""
    model = model_with(name)
    with tome_core.patch(model, KV) as handle:
        call(model)
        assert not any("together" in route for route in routes_of(handle))
        for module in self_attentions(model).values():
            module.set_processor(derived_from(AttnProcessor2_0, "Mine")())
        handle.reset_counts()
        call(model)
        assert_tells_of(handle, "Mine")
        for module in self_attentions(model).values():
            put(module, made(name))
        handle.reset_counts()
        call(model)
        assert routes_of(handle) and not any("together" in route for route in routes_of(handle))
