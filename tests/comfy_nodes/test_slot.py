"""ComfyUI's attention: merged keys give what repeated keys give, by whichever function is in force."""

from __future__ import annotations

import functools

import pytest
import torch

from comfy_nodes.attentions import function_in_force
from tests import comfy_attention as comfy
from tests.conformance import CHANNELS, DTYPES, GROUPS, HEADS, far, own, telling, tokens, ways
from tests.models import comfy_double
from tome_core.attention import known_of
from tome_core.attention.core import attend_merged
from tome_core.models.unet_blocks import find_blocks

ADDING = ("attention_basic", "attention_split", "attention_pytorch")
WIDENED = ("attention_sub_quad", "attention_flash")


def attention(dtype=torch.float32, kind=comfy.CrossAttention, precision=None):
    return telling(kind(CHANNELS, HEADS, precision), dtype)


@pytest.fixture
def in_force(monkeypatch):
    def use(function, masked=None):
        monkeypatch.setattr(comfy, "optimized_attention", function)
        monkeypatch.setattr(comfy, "optimized_attention_masked", function if masked is None else masked)

    return use


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [*ADDING, *WIDENED])
def test_each_function_takes_sizes_its_own_way(in_force, name, dtype):
    in_force(getattr(comfy, name))
    expected = {"bias", "wider heads"} if name in ADDING else {"wider heads"}
    assert ways(attention(dtype), dtype, transformer_options={"sigmas": None}) == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_logits_may_be_in_another_precision(in_force, dtype):
    in_force(comfy.attention_basic)
    assert ways(attention(dtype, precision=torch.float32), dtype) == {"bias", "wider heads"}


def test_an_older_comfyui_without_options_works_too():
    assert ways(attention(kind=comfy.Before)) == {"bias", "wider heads"}


def test_an_override_is_called_and_gets_wider_heads():
    seen = []

    def override(function, q, k, v, heads, **kwargs):
        seen.append((function.__name__, q.shape[-1], kwargs.get("mask")))
        return function(q, k, v, heads, **kwargs)

    options = {"optimized_attention_override": override}
    assert ways(attention(), transformer_options=options) == {"wider heads"}
    assert seen and all(one == ("attention_pytorch", CHANNELS + 8 * HEADS, None) for one in seen)


@pytest.mark.parametrize("name", [*ADDING, *WIDENED])
def test_an_attention_that_comfyuis_own_node_chose_takes_sizes_as_where_it_is_in_force(in_force, name):
    in_force(comfy.attention_sub_quad if name in ADDING else comfy.attention_pytorch)
    options = {"optimized_attention_override": comfy.chosen(getattr(comfy, name))}
    expected = {"bias", "wider heads"} if name in ADDING else {"wider heads"}
    assert ways(attention(), transformer_options=options) == expected


def test_every_attention_in_force_has_a_name_of_its_own(in_force):
    unet, names = comfy_double().model.diffusion_model, []
    find_blocks(unet)[0].block.attn1 = attention()
    for name in (*ADDING, *WIDENED):
        in_force(getattr(comfy, name))
        names.append(function_in_force(unet, {"sigmas": None}))
        names.append(function_in_force(unet, {"optimized_attention_override": comfy.chosen(getattr(comfy, name))}))
    names.append(function_in_force(unet, {"optimized_attention_override": own}))
    assert len(set(names)) == len(names) and all(names)


def unknown(q, k, v, heads, mask=None, **kwargs):
    assert mask is None
    return comfy.attention_flash(q, k, v, heads)


@functools.wraps(comfy.attention_pytorch)
def dressed_up(*args, **kwargs):
    """By its name it is ComfyUI's."""
    return unknown(*args, **kwargs)


@pytest.mark.parametrize("function", [unknown, dressed_up, functools.partial(comfy.attention_flash)])
def test_a_function_that_nobody_knows_gets_wider_heads(in_force, function):
    in_force(function)
    assert ways(attention()) == {"wider heads"}


def test_no_mask_is_made_where_it_would_call_another_function(in_force):
    in_force(comfy.attention_pytorch, masked=comfy.attention_basic)
    assert ways(attention()) == {"wider heads"}


def test_the_function_in_force_is_asked_for_at_each_call(in_force):
    module = attention()
    assert ways(module) == {"bias", "wider heads"}
    in_force(comfy.attention_sub_quad)
    assert ways(module) == {"wider heads"}


@pytest.mark.parametrize("kwargs", [{"mask": torch.ones(1)}, {"pe": torch.ones(1)}])
def test_what_else_comes_along_is_a_problem(kwargs):
    module = attention()
    assert known_of(module).problem(module, kwargs) == f"{next(iter(kwargs))} came along"
    assert known_of(module).problem(module, {"mask": None, "transformer_options": {"patches": {}}}) is None


def test_values_of_their_own_are_projected_by_to_v():
    module, x = attention(), tokens(2)
    keys, values = tokens(2, count=GROUPS, seed=1), tokens(2, count=GROUPS, seed=2)
    out = attend_merged(known_of(module), module, x, keys, values, None, {}).out
    assert far(out, module(x, keys, values)) < 1e-6
