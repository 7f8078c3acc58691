"""An attention function is known by what it does, which is tried on a few tokens, also in the place of torch's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from diffusers.models import attention_dispatch
from diffusers.models.attention_dispatch import dispatch_attention_fn

from tests import attention_packages as packages
from tests.conformance import SIDE, attention, way, why_left_alone
from tests.doubles import attend, of_heads
from tome_core.attention import functions
from tome_core.attention.functions import try_once
from tome_core.attention.merged import BIAS, OWN_BIAS

TORCHS = torch.nn.functional.scaled_dot_product_attention


@pytest.fixture(autouse=True)
def _forget(monkeypatch):
    monkeypatch.setattr(functions, "_TRIED", type(functions._TRIED)())


@pytest.fixture
def torchs(monkeypatch):
    """Puts a function in the place of torch's."""
    return lambda function: monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", function)


# --- functions in the place of torch's --------------------------------------------------------------------------------


def parts(attn, x):
    """``[B, H, N, d]``."""
    return [of_heads(layer(x), attn.heads) for layer in (attn.to_q, attn.to_k, attn.to_v)]


def by_module(self, attn, x, *_, **__):
    return F.scaled_dot_product_attention(*parts(attn, x)).transpose(1, 2).flatten(2)


def by_a_helper(self, attn, x, *_, **__):
    """Of another module."""
    return attend(attn.to_q(x), attn.to_k(x), attn.to_v(x), attn.heads)


def by_dispatch(self, attn, x, *_, **__):
    q, k, v = (layer(x).unflatten(-1, (attn.heads, -1)) for layer in (attn.to_q, attn.to_k, attn.to_v))
    return dispatch_attention_fn(q, k, v).flatten(2)


def processor(call):
    """Of a class of its own, whose code this is."""
    return type("Mine", (), {"__call__": call})()


def refusing(query, key, value, attn_mask=None, **more):
    assert attn_mask is None
    return TORCHS(query, key, value, **more)


def adding(*args, **kwargs):
    return TORCHS(*args, **kwargs)


def linear(query, key, value, *_, **__):
    """No softmax."""
    return query @ (key.mT @ value) / key.shape[-2]


def of_one_size(query, *args, **kwargs):
    assert query.shape[2] == SIDE**2 and query.shape[0] == 3
    return TORCHS(query, *args, **kwargs)


SAGES = (packages.sageattn1, packages.sageattn, packages.sageattn3_blackwell)  # each swallows a bias


@pytest.mark.parametrize("call", [by_module, by_a_helper, by_dispatch])
def test_a_function_in_place_of_torchs_is_told_of_sizes_or_torchs_own_is(call, torchs):
    """It comes and goes, and each call notices."""
    module = attention(processor(call))
    swallowing = () if call is by_dispatch else SAGES  # the dispatcher gives a ``scale``
    for function in (TORCHS, *swallowing, refusing, adding):
        torchs(function)
        assert way(module) == (BIAS if function in (TORCHS, adding) else OWN_BIAS), function
    for function in (linear, of_one_size):
        torchs(function)
        assert "no attention" in why_left_alone(module), function


def test_a_function_that_gives_logarithms_as_well_is_left_alone_and_named(torchs):
    def with_logarithms(self, attn, x, *_, **__):
        return F.scaled_dot_product_attention(*parts(attn, x), return_lse=True)[0].transpose(1, 2).flatten(2)

    torchs(packages.sageattn)
    reason = why_left_alone(attention(processor(with_logarithms)))
    assert "no attention: tests.attention_packages.sageattn" in reason


# backends of diffusers' dispatcher that add a bias; for the others torch's own function answers for merged keys
ADDING = ("native", "_native_cudnn", "_native_efficient", "_native_math", "flex", "xformers")
REGISTRY = attention_dispatch._AttentionBackendRegistry
BACKENDS = [backend.value for backend in REGISTRY.list_backends()]


@pytest.mark.parametrize("name", [
    # flex imports a compiler
    pytest.param(name, marks=[pytest.mark.slow] * (name == "flex")) for name in BACKENDS
])  # fmt: skip
def test_every_backend_of_diffusers_is_tried_as_a_function_is(name, monkeypatch):
    """By the dispatcher, whose backend is looked up at each call."""
    packages.put_into_diffusers(monkeypatch, attention_dispatch)
    monkeypatch.setattr(REGISTRY, "_active_backend", attention_dispatch.AttentionBackendName(name))
    assert way(attention(processor(by_dispatch))) == (BIAS if name in ADDING else OWN_BIAS)


# --- trying -----------------------------------------------------------------------------------------------------------


def by_products(q, k, v, bias=None, scale=0.25):
    """``[B, S, H, d]``."""
    logits = torch.einsum("bqhd,bkhd->bhqk", q, k) * scale
    return torch.einsum("bhqk,bkhd->bqhd", (logits if bias is None else logits + bias).softmax(-1), v)


def with_bias(change):
    """The function with another bias."""
    return lambda q, k, v, bias: by_products(q, k, v, None if bias is None else change(bias))


LIKE = torch.zeros(1, 4, 2, 16)


@pytest.mark.parametrize("function, expected", [
    (by_products, True),
    (with_bias(lambda bias: None), False),
    (with_bias(lambda bias: bias * 0.5), False),
    (with_bias(lambda bias: (bias == 0) * -1e4), False),  # yes or no
    (with_bias(lambda bias: (bias != 0) * -1e4), False),  # no or yes
    (lambda q, k, v, bias: by_products(q, k, v, bias, 0.3), None),
    (lambda q, k, v, bias: by_products(q, k, v, bias)[:, :1], None),
    (lambda q, k, v, bias: q * float("nan"), None),
    (lambda q, k, v, bias: 1 / 0, None),
])  # fmt: skip
def test_what_a_function_does_is_found_on_a_few_tokens(function, expected):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert try_once("name", function, 0.25, LIKE.to(dtype)) is expected, dtype


def test_a_function_is_tried_once_for_its_heads_and_dtype_and_draws_from_no_generator():
    calls, state = [], torch.get_rng_state()

    def function(*args):
        calls.append(args)
        return by_products(*args)

    for key, like in (("name", LIKE), ("name", LIKE), ("name", LIKE[:, :, :1]), ("name", LIKE.half()), ("other", LIKE)):
        try_once(key, function, 0.25, like)
    assert len(calls) == 8 and torch.equal(torch.get_rng_state(), state)  # without a bias, and with one


def test_answers_are_remembered_up_to_a_bound():
    for number in range(functions._MOST + 5):
        try_once(number, by_products, 0.25, LIKE)
    assert len(functions._TRIED) == functions._MOST
    assert 0 not in {key[0] for key in functions._TRIED}
