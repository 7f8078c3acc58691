"""An attention is known by the function that its code calls, and the function by what it does."""

from __future__ import annotations

import functools
import types
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from diffusers.models import attention_dispatch, attention_processor
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.attention_processor import AttnProcessor, AttnProcessor2_0
from torch.nn.functional import scaled_dot_product_attention

import tome_core
from tests import attention_packages as packages
from tests import conformance as laws
from tests.conformance import KV, SIDE, UNetOf, attention, merging_by, run, tokens, way, why_left_alone
from tests.doubles import attend, of_heads
from tome_core.attention import functions
from tome_core.attention.functions import try_once
from tome_core.attention.merged import BIAS, OWN_BIAS

TORCHS = torch.nn.functional.scaled_dot_product_attention
xformers = types.SimpleNamespace()  # a test puts one here
_calls = 0


@pytest.fixture(autouse=True)
def _forget(monkeypatch):
    monkeypatch.setattr(functions, "_TRIED", type(functions._TRIED)())


@pytest.fixture
def torchs(monkeypatch):
    """Puts a function in the place of torch's."""
    return lambda function: monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", function)


# --- callers ----------------------------------------------------------------------------------------------------------


def parts(attn: Any, x: torch.Tensor) -> list[torch.Tensor]:
    """``[B, H, N, d]``."""
    return [of_heads(layer(x), attn.heads) for layer in (attn.to_q, attn.to_k, attn.to_v)]


def flat(out: torch.Tensor) -> torch.Tensor:
    return out.transpose(1, 2).flatten(2)


def processor(call: Any) -> Any:
    """Of a class of its own, whose code this is."""
    return type("Mine", (), {"__call__": call})()


def by_module(self, attn, x, *_, **__):
    return attn.to_out[0](flat(F.scaled_dot_product_attention(*parts(attn, x))))


def by_a_helper(self, attn, x, *_, **__):
    """Of another module."""
    return attend(attn.to_q(x), attn.to_k(x), attn.to_v(x), attn.heads)


def by_dispatch(self, attn, x, *_, **__):
    return dispatch_attention_fn(*(one.transpose(1, 2) for one in parts(attn, x))).flatten(2)


def inside_a_function(self, attn, x, *_, **__):
    def inside(one):
        return (lambda: F.scaled_dot_product_attention(*parts(attn, one)))()

    return flat(inside(x))


def with_an_empty_tuple(self, attn, x, sizes=None, **__):
    sizes = () if sizes is None else sizes  # among the constants of this code
    return flat(F.scaled_dot_product_attention(*parts(attn, x), *sizes, scale=0.7))


def by_xformers(self, attn, x, *_, **__):
    q, k, v = (one.transpose(1, 2) for one in parts(attn, x))
    return xformers.ops.memory_efficient_attention(q, k, v, attn_bias=None).flatten(2)


def by_xformers_and_flat(self, attn, x, *_, **__):
    """Heads lie within the batch."""
    out = xformers.ops.memory_efficient_attention(*(one.flatten(0, 1) for one in parts(attn, x)), op=None)
    return flat(out.unflatten(0, (-1, attn.heads)))


def a_function(attn, x, *_, **__):
    return flat(F.scaled_dot_product_attention(*parts(attn, x)))


def counting(self, attn, x, *_, **__):
    """As StoryDiffusion's, in a global."""
    global _calls
    _calls += 1
    return flat(F.scaled_dot_product_attention(*parts(attn, x)))


class ByAMethod:
    def __call__(self, attn, x, *_, **__):
        return self.attend(attn, x)

    def attend(self, attn, x):
        return flat(F.scaled_dot_product_attention(*parts(attn, x)))


class Named(NamedTuple):
    factor: float = 0.5

    def __call__(self, attn, x, *_, **__):
        return flat(F.scaled_dot_product_attention(*parts(attn, x))) * self.factor


class Halved(AttnProcessor2_0):
    """By its name, and in part, it is diffusers'."""

    __qualname__ = __name__ = "AttnProcessor2_0"

    def __call__(self, attn, x, *args, **kwargs):
        return super().__call__(attn, x, *args, **kwargs) * 0.5


class InvokeAIs(AttnProcessor2_0):
    """Another package's, whose arguments come with each call."""

    def __call__(self, attn, x, encoder_hidden_states=None, attention_mask=None, *, percent_through):
        assert percent_through == 0.5
        return flat(F.scaled_dot_product_attention(*parts(attn, x)))


CALLERS = {
    "by a module's name": processor(by_module),
    "by its full name": processor(lambda self, attn, x, *_, **__: flat(
        torch.nn.functional.scaled_dot_product_attention(*parts(attn, x)))),
    "by its own name": processor(lambda self, attn, x, *_, **__: flat(scaled_dot_product_attention(*parts(attn, x)))),
    "by a helper": processor(by_a_helper),
    "by a method": ByAMethod(),
    "by diffusers' dispatcher": processor(by_dispatch),
    "inside a function": processor(inside_a_function),
    "decorated": processor(torch.no_grad()(by_module)),
    "with an empty tuple": processor(with_an_empty_tuple),
    "derived": Halved(),
    "derived, by hand": type("Mine", (AttnProcessor,), {})(),
    "with slots": type("Slim", (), {"__slots__": ("scale",), "__call__": by_module})(),
    "a named tuple": Named(),
    "a function": a_function,
    "a partial function": functools.partial(a_function),
    "by xformers": processor(by_xformers),
    "by xformers and flat": processor(by_xformers_and_flat),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLERS)
def test_whatever_its_class_an_attention_is_known_by_the_function_it_calls(name, monkeypatch):
    laws.with_xformers(monkeypatch, attention_processor)
    monkeypatch.setitem(globals(), "xformers", attention_processor.xformers)
    assert way(attention(CALLERS[name])) == (OWN_BIAS if "xformers" in name else BIAS)


def test_arguments_of_a_call_get_there_and_writes_of_its_code_too(monkeypatch):
    assert way(attention(InvokeAIs()), percent_through=0.5) == BIAS
    monkeypatch.setitem(globals(), "_calls", 0)
    unet = UNetOf(attention(processor(counting)))
    with merging_by(), tome_core.patch(unet, KV) as handle:
        for _ in range(3):
            run(unet, tokens(1))
    assert _calls == 3 and handle.report().merged_anything


def test_values_of_another_width_than_keys_merge_without_a_correction():
    def wider(attn, x, **_):
        q, k, v = parts(attn, x)
        return flat(F.scaled_dot_product_attention(q, k, torch.cat([v, -v], -1)).chunk(2, -1)[1])

    unet, found = UNetOf(attention(wider)), []
    for correction in (True, False):
        with tome_core.patch(unet, side="kv", use_rand=False, correction=correction) as handle:
            found.append(run(unet, tokens(2)))
        assert handle.report().merged_anything
    assert torch.equal(*found)


@pytest.mark.parametrize("body", [AttnProcessor.__call__, AttnProcessor2_0.__call__], ids=["by hand", "by function"])
def test_scores_by_hand_are_known_by_the_function_that_computes_them_alone(body):
    """The name of a class is no proof."""

    def __call__(self, *args, **kwargs):
        return body(self, *args, **kwargs) * 2

    kind = type("AttnProcessor", (), {"__call__": __call__, "__module__": AttnProcessor.__module__})
    if body is AttnProcessor2_0.__call__:
        assert way(attention(kind())) == BIAS
    else:
        assert "__call__ calls no attention function that is known" in why_left_alone(attention(kind()))


def test_the_processor_that_is_in_force_at_a_call_decides():
    """Hosts change them between steps."""
    module, x = attention(), tokens(2)
    unet = UNetOf(module)
    with merging_by(), tome_core.patch(unet, KV) as handle:
        expected = run(unet, x)
        module.set_processor(Halved())
        torch.testing.assert_close(run(unet, x), expected * 0.5)
        module.set_processor(AttnProcessor())
        torch.testing.assert_close(run(unet, x), expected, rtol=1e-4, atol=1e-5)
        module.set_processor(AttnProcessor2_0())
        assert torch.equal(run(unet, x), expected)
    assert handle.report().levels[0].sized_by == {BIAS: 4}


# --- more than attention ----------------------------------------------------------------------------------------------


class Asking:
    """Asks its function for more, of parts that are changed."""

    def __init__(self, change=lambda *one: one, **more):
        self.change, self.more = change, more

    def __call__(self, attn, x, *_, **__):
        torch.manual_seed(0)
        out = F.scaled_dot_product_attention(*self.change(*parts(attn, x)), **self.more)
        return flat(out[0] if isinstance(out, tuple) else out)


def test_a_call_that_asks_for_more_than_attention_is_left_alone(torchs):
    def reason(*change, **more):
        return why_left_alone(attention(Asking(*change, **more)), config=tome_core.MergeConfig(side="kv"))

    assert "more than attention" in reason(dropout_p=0.1)
    assert "more than attention" in reason(is_causal=True)
    assert "mask" in reason(attn_mask=torch.zeros(1, SIDE**2))
    assert "mask" in reason(attn_mask=torch.ones(3, 1, SIDE**2, SIDE**2).tril().bool())
    assert "keys and values" in reason(lambda q, k, v: (q, k[:1], v[:1]))  # of one sample for all
    torchs(packages.sageattn)
    assert "no attention: tests.attention_packages.sageattn" in reason(return_lse=True)  # logarithms as well


def test_a_mask_that_hides_nothing_is_none():
    def masked(attn, x, **_):
        return flat(F.scaled_dot_product_attention(*parts(attn, x), torch.ones(len(x), 1, 1, SIDE**2).bool()))

    assert way(attention(masked)) == BIAS


# --- functions in the place of torch's --------------------------------------------------------------------------------


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


@pytest.mark.parametrize("caller", ["by a module's name", "by a helper", "by diffusers' dispatcher"])
def test_a_function_in_place_of_torchs_is_told_of_sizes_or_torchs_own_is(caller, torchs):
    """It comes and goes, and each call notices."""
    module = attention(CALLERS[caller])
    swallowing = refusing if "dispatcher" in caller else packages.sageattn  # the dispatcher gives a ``scale``
    for function, expected in ((TORCHS, BIAS), (swallowing, OWN_BIAS), (refusing, OWN_BIAS), (adding, BIAS)):
        torchs(function)
        assert way(module) == expected, function
    for function in (linear, of_one_size):
        torchs(function)
        assert "no attention" in why_left_alone(module), function


@pytest.mark.parametrize("sage", [packages.sageattn1, packages.sageattn, packages.sageattn3_blackwell])
def test_each_of_sageattentions_signatures_in_place_of_torchs_leaves_merged_keys_to_torch(sage, torchs):
    torchs(sage)
    for caller in ("by a module's name", "by a helper"):
        assert way(attention(CALLERS[caller])) == OWN_BIAS


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
    assert way(attention(CALLERS["by diffusers' dispatcher"])) == (BIAS if name in ADDING else OWN_BIAS)


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
        assert try_once("one", function, 0.25, LIKE.to(dtype)) is expected, dtype


def test_a_function_is_tried_once_for_its_heads_and_dtype_and_draws_from_no_generator():
    calls, state = [], torch.get_rng_state()

    def function(*args):
        calls.append(args)
        return by_products(*args)

    for _ in range(3):
        try_once("one", function, 0.25, LIKE)
    assert len(calls) == 2 and all(len(q) == 1 for q, *_ in calls)
    for like in (LIKE[:, :, :1], LIKE.half()):
        try_once("one", function, 0.25, like)
    try_once("other", function, 0.25, LIKE)
    assert len(calls) == 8 and torch.equal(torch.get_rng_state(), state)


def test_answers_are_remembered_up_to_a_bound():
    for number in range(functions._MOST + 5):
        try_once(number, by_products, 0.25, LIKE)
    assert len(functions._TRIED) == functions._MOST
    assert 0 not in {key[0] for key in functions._TRIED}
