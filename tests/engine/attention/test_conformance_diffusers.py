"""The attention processors of diffusers that the engine knows: merged keys give what repeated keys give."""

from __future__ import annotations

import copy

import pytest
import torch
from diffusers.models.attention_processor import Attention, AttnProcessor2_0

import tome_core
from tests.conformance import (
    DTYPES,
    TOLERANCE,
    assert_all_sized,
    assert_sized,
    held,
    merge_by,
    ragged,
    routes_of,
    self_attentions,
    watched,
)
from tests.conformance_diffusers import (
    HEADS,
    KV,
    VARIANTS,
    WIDTH,
    attention,
    call,
    made,
    model_with,
    own,
    plain_xformers,  # noqa: F401
    tokens,
)
from tests.diffusers_processors import KNOWN, of_diffusers
from tests.models import fixed
from tome_core import MergeConfig
from tome_core.attention import known_of
from tome_core.attention.core import attend_merged

known_ones = pytest.mark.parametrize("name", KNOWN)

# --- by itself -------------------------------------------------------------------------------------------------------


@known_ones
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_known_attention_gives_what_repeated_keys_give(name, variant):
    module = attention(made(name), **VARIANTS[variant])
    held(own, module, tokens(2, 11), tokens(2, 7, seed=1), ragged(2, 60, 7))


@known_ones
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("upcast", [False, True])
def test_a_known_attention_gives_what_repeated_keys_give_in_every_dtype(name, dtype, upcast):
    module = attention(made(name), upcast_attention=upcast, upcast_softmax=upcast, bias=True).to(dtype)
    tolerance = TOLERANCE[torch.float32] if upcast and dtype == torch.float64 else None
    held(own, module, tokens(2, 11, dtype), tokens(2, 7, dtype, seed=1), ragged(2, 60, 7), tolerance)


@known_ones
@pytest.mark.parametrize("batch", range(1, 7))
def test_a_known_attention_keeps_the_samples_of_a_batch_apart(name, batch):
    queries, keys = 1 + 5 * (batch % 3), 2 + 4 * (batch % 4)
    module = attention(made(name))
    plan = ragged(batch, 40, keys, seed=batch)
    held(own, module, tokens(batch, queries), tokens(batch, keys, seed=1), plan)


@known_ones
def test_one_plan_serves_all_samples_of_a_batch(name):
    plan = ragged(1, 40, 7)
    ways = held(own, attention(made(name)), tokens(4, 11), tokens(4, 7, seed=1), plan)
    assert ways <= {"bias", "wider heads"} and "wider heads" in ways


@known_ones
def test_a_known_attention_gives_what_repeated_keys_give_under_autocast(name):
    """As trainers run it: weights in float32, products in bfloat16."""
    module = attention(made(name), bias=True)
    with torch.autocast("cpu", torch.bfloat16):
        held(own, module, tokens(2, 11), tokens(2, 7, seed=1), ragged(2, 60, 7), TOLERANCE[torch.bfloat16])


def test_a_fused_projection_is_what_counts_whatever_it_was_fused_of():
    module = attention(made("FusedAttnProcessor2_0"), bias=True)
    for layer in (module.to_q, module.to_k, module.to_v):
        fixed(layer, seed=5)
    held(own, module, tokens(2, 11), tokens(2, 7, seed=1), ragged(2, 60, 7))


def test_projections_that_were_fused_once_do_not_count_under_another_processor():
    module = attention(made("FusedAttnProcessor2_0"))
    fixed(module.to_qkv, seed=5)
    module.set_processor(AttnProcessor2_0())
    assert module.fused_projections
    held(own, module, tokens(2, 11), tokens(2, 7, seed=1), ragged(2, 60, 7))


@known_ones
def test_what_was_put_on_projections_counts(name):
    """LoRA replaces a projection, offloading wraps its forward, others hook it."""
    module = attention(made(name))
    asked = {"to_q": 0, "to_k": 0, "to_v": 0, "to_qkv": 0, "to_out": 0}

    def note(role: str, out: torch.Tensor) -> torch.Tensor:
        asked[role] += 1
        return out * 1.25

    roles = ["to_qkv"] if name.startswith("Fused") else ["to_q", "to_k", "to_v"]
    for role in roles:
        getattr(module, role).register_forward_hook(lambda layer, args, out, role=role: note(role, out))
    module.to_out[0].register_forward_hook(lambda layer, args, out: note("to_out", out))
    x, keys, plan = tokens(2, 11), tokens(2, 7, seed=1), ragged(2, 60, 7)
    with torch.no_grad():
        out = attend_merged(known_of(module), module, x, keys, keys, plan, {}).out
    assert all(asked[role] >= 1 for role in (*roles, "to_out"))
    plain = attention(made(name))
    for layer in (*(getattr(plain, role) for role in roles), plain.to_out[0]):
        for parameter in layer.parameters():
            parameter.data.mul_(1.25)
    assert_sized(own, plain, x, keys, plan.sizes, out)


@pytest.mark.parametrize("name", [name for name in KNOWN if "Sliced" in name])
@pytest.mark.parametrize("size", [1, 2, 3, 8, 100])
def test_slices_of_every_size_give_the_same(name, size):
    module = attention(of_diffusers(name)(size))
    held(own, module, tokens(2, 11), tokens(2, 7, seed=1), ragged(2, 60, 7))


# --- in a UNet -------------------------------------------------------------------------------------------------------


@known_ones
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("batch", [1, 3])
def test_a_known_attention_in_a_unet_gives_what_repeated_keys_give(name, dtype, batch, monkeypatch):
    merge_by(monkeypatch, 13)
    model = model_with(name).to(dtype)
    plain = copy.deepcopy(model)
    with tome_core.patch(model, KV) as handle, watched(model) as seen:
        call(model, batch)
    assert len(seen) == 3
    assert_all_sized(own, plain, seen)
    assert routes_of(handle) and not any("together" in route for route in routes_of(handle)), handle.report()


@known_ones
def test_a_known_attention_in_a_unet_stays_known_beside_an_adapters_masks(name, monkeypatch):
    """A UNet hands every block's attentions what is meant for those of the prompt."""
    merge_by(monkeypatch, 13)
    model = model_with(name)
    plain = copy.deepcopy(model)
    with tome_core.patch(model, KV), watched(model) as seen:
        call(model, cross_attention_kwargs={"ip_adapter_masks": [torch.ones(1, 1, 8, 8)]})
    assert_all_sized(own, plain, seen)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_of_attention_gives_in_a_unet_what_repeated_keys_give(variant, monkeypatch):
    """With the processor that diffusers chooses for it."""
    merge_by(monkeypatch, 13)
    model = model_with(None)
    for name, _ in list(self_attentions(model).items()):
        block = model.get_submodule(name.rsplit(".", 1)[0])
        settings = {"heads": HEADS, "dim_head": WIDTH // HEADS, **VARIANTS[variant]}
        block.attn1 = fixed(Attention(WIDTH, **settings))
    plain = copy.deepcopy(model)
    with tome_core.patch(model, KV), watched(model) as seen:
        call(model)
    assert_all_sized(own, plain, seen)


@known_ones
def test_queries_that_merge_beside_keys_give_what_they_give_for_repeated_keys(name, monkeypatch):
    merge_by(monkeypatch, 13)
    model = model_with(name)
    plain = copy.deepcopy(model)
    config = MergeConfig(correction=False, side="kv", ratio=0.75, use_rand=False, query_ratio=0.5)
    with tome_core.patch(model, config), watched(model) as seen:
        call(model)
    assert all(one.queries is not None for one in seen)
    assert_all_sized(own, plain, seen)
