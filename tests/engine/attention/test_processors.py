"""The attention processors of diffusers that the engine knows: merged keys give what repeated keys give."""

from __future__ import annotations

import copy

import pytest
import torch
from diffusers.models.attention_processor import Attention, AttnProcessor2_0

import tome_core
from tests import conformance as laws
from tests.conformance import tokens
from tests.conformance_diffusers import HEADS, KV, VARIANTS, WIDTH, attention, call, made, model_with, own
from tests.diffusers_processors import KNOWN, of_diffusers
from tests.models import fixed

pytestmark = pytest.mark.usefixtures("plain_xformers")
known_ones = pytest.mark.parametrize("name", KNOWN)

# --- by itself -------------------------------------------------------------------------------------------------------


@known_ones
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_known_attention_gives_what_repeated_keys_give(name, variant):
    module = attention(made(name), **VARIANTS[variant])
    laws.held(own, module, tokens(2, 11), tokens(2, 7, seed=1), laws.ragged(2, 60, 7))


@known_ones
@pytest.mark.parametrize("dtype", laws.DTYPES, ids=str)
@pytest.mark.parametrize("upcast", [False, True])
def test_a_known_attention_gives_what_repeated_keys_give_in_every_dtype(name, dtype, upcast):
    module = attention(made(name), upcast_attention=upcast, upcast_softmax=upcast, bias=True).to(dtype)
    tolerance = laws.TOLERANCE[torch.float32] if upcast and dtype == torch.float64 else None
    laws.held(own, module, tokens(2, 11, dtype), tokens(2, 7, dtype, seed=1), laws.ragged(2, 60, 7), tolerance)


@known_ones
def test_one_plan_serves_all_samples_of_a_batch(name):
    plan = laws.ragged(1, 40, 7)
    ways = laws.held(own, attention(made(name)), tokens(4, 1), tokens(4, 7, seed=1), plan)
    assert ways <= {"bias", "wider heads"} and "wider heads" in ways


@known_ones
def test_a_known_attention_gives_what_repeated_keys_give_under_autocast(name):
    """As trainers run it: weights in float32, products in bfloat16."""
    module, tolerance = attention(made(name), bias=True), laws.TOLERANCE[torch.bfloat16]
    with torch.autocast("cpu", torch.bfloat16):
        laws.held(own, module, tokens(2, 11), tokens(2, 7, seed=1), laws.ragged(2, 60, 7), tolerance)


def test_a_fused_projection_is_what_counts_whatever_it_was_fused_of():
    module = attention(made("FusedAttnProcessor2_0"), bias=True)
    for layer in (module.to_q, module.to_k, module.to_v):
        fixed(layer, seed=5)
    laws.held(own, module, tokens(2, 11), tokens(2, 7, seed=1), laws.ragged(2, 60, 7))


def test_projections_that_were_fused_once_do_not_count_under_another_processor():
    module = attention(made("FusedAttnProcessor2_0"))
    fixed(module.to_qkv, seed=5)
    module.set_processor(AttnProcessor2_0())
    assert module.fused_projections
    laws.held(own, module, tokens(2, 11), tokens(2, 7, seed=1), laws.ragged(2, 60, 7))


@known_ones
def test_what_was_put_on_projections_counts(name):
    roles = ["to_qkv", "to_out.0"] if name.startswith("Fused") else ["to_q", "to_k", "to_v", "to_out.0"]
    laws.held_with_hooks(own, lambda: attention(made(name)), roles, tokens(2, 11), tokens(2, 7, seed=1))


@pytest.mark.parametrize("name", [name for name in KNOWN if "Sliced" in name])
@pytest.mark.parametrize("size", [1, 2, 3, 8, 100])
def test_slices_of_every_size_give_the_same(name, size):
    module = attention(of_diffusers(name)(size))
    laws.held(own, module, tokens(2, 11), tokens(2, 7, seed=1), laws.ragged(2, 60, 7))


# --- in a UNet -------------------------------------------------------------------------------------------------------


IN_A_UNET = {  # batch, dtype, config, arguments of the call
    "one": (1, torch.float32, KV, {}), "three": (3, torch.float32, KV, {}), "half": (3, torch.bfloat16, KV, {}),
    # a UNet hands every block's attentions what is meant for those of the prompt
    "masks": (2, torch.float32, KV, {"cross_attention_kwargs": {"ip_adapter_masks": [torch.ones(1, 1, 8, 8)]}}),
}  # fmt: skip


@known_ones
@pytest.mark.parametrize("how", IN_A_UNET)
def test_a_known_attention_in_a_unet_gives_what_repeated_keys_give(name, how, monkeypatch):
    batch, dtype, config, more = IN_A_UNET[how]
    laws.merge_by(monkeypatch, 13)
    model = model_with(name).to(dtype)
    plain = copy.deepcopy(model)
    with tome_core.patch(model, config) as handle, laws.watched(model) as seen:
        call(model, batch, **more)
    assert len(seen) == 3
    laws.assert_all_sized(own, plain, seen)
    assert laws.routes_of(handle) and not any("together" in route for route in laws.routes_of(handle)), handle.report()


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_of_attention_gives_in_a_unet_what_repeated_keys_give(variant, monkeypatch):
    """With the processor that diffusers chooses for it."""
    laws.merge_by(monkeypatch, 13)
    model = model_with(None)
    for name in laws.self_attentions(model):
        settings = {"heads": HEADS, "dim_head": WIDTH // HEADS, **VARIANTS[variant]}
        model.get_submodule(name.removesuffix(".attn1")).attn1 = fixed(Attention(WIDTH, **settings))
    plain = copy.deepcopy(model)
    with tome_core.patch(model, KV), laws.watched(model) as seen:
        call(model)
    laws.assert_all_sized(own, plain, seen)
