"""Every attention that hosts call, in one table: merged keys give what repeated keys give, else it is left alone."""

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from diffusers.models import attention_dispatch, attention_processor
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.attention_processor import AttnProcessor, AttnProcessor2_0
from ldm.modules import attention as ldm_attention
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

import tome_core
from tests.engine.attention import conformance
from tests.engine.attention.conformance import (
    CHANNELS,
    HEADS,
    KV,
    SIDE,
    UNetOf,
    attention,
    run,
    telling,
    tokens,
    way,
    why_left_alone,
)
from tests.host_doubles.blocks import SgmAttention, attend, of_heads
from tome_core.attention import functions
from tome_core.attention.merged import BIAS, OWN_BIAS
from tome_core.models.attention_calls import HeadsCall

xformers = SimpleNamespace()  # a test puts one here
UNKNOWN = "calls no attention function that is known"


@pytest.fixture(autouse=True)
def _hosts(monkeypatch):
    """Install a double of xformers, and make LDM's plain attention as exact as its input."""
    conformance.with_xformers(monkeypatch, attention_processor)
    monkeypatch.setitem(globals(), "xformers", attention_processor.xformers)
    monkeypatch.setattr(ldm_attention, "_ATTN_PRECISION", "fp16")
    monkeypatch.setattr(functions, "_TRIED", type(functions._TRIED)())


def parts(attn: Any, x: torch.Tensor) -> list[torch.Tensor]:
    """``[B, H, N, d]``."""
    return [of_heads(layer(x), attn.heads) for layer in (attn.to_q, attn.to_k, attn.to_v)]


def flat(out: torch.Tensor) -> torch.Tensor:
    return out.transpose(1, 2).flatten(2)


class Kind(NamedTuple):
    """An attention. make: makes it in a dtype; way: how it gets the sizes; context, mask: arguments of its call."""

    make: Callable[[torch.dtype], nn.Module]
    way: str
    context: dict[str, Any]
    mask: dict[str, Any]


def of_diffusers(name: str, dtype: torch.dtype = torch.float32, **settings: Any) -> nn.Module:
    kind = getattr(attention_processor, name)
    return attention(kind(3) if "Sliced" in name else kind(), dtype, **{"bias": True, **settings})


VISIBLE = torch.arange(SIDE**2) < 40
ADDED = torch.where(VISIBLE, 0.0, -10.0)[None, None, None]
OTHERS = tokens(3, count=20, seed=1)
PROCESSORS = {
    "AttnProcessor": BIAS,  # computes by hand, like the next one
    "SlicedAttnProcessor": BIAS,
    "AttnProcessor2_0": BIAS,
    "XFormersAttnProcessor": OWN_BIAS,
    "FusedAttnProcessor2_0": BIAS,  # takes no context
}
OTHERS_OF = {name: {"encoder_hidden_states": OTHERS} for name in PROCESSORS if "Fused" not in name}
MASK = {"attention_mask": ADDED[0].expand(3, -1, -1)}
HOSTS = {**{name: Kind(functools.partial(of_diffusers, name), expected, OTHERS_OF.get(name, {}), MASK)
            for name, expected in PROCESSORS.items()},
         "ldm": Kind(lambda dtype: telling(ldm_attention.CrossAttention(CHANNELS, heads=HEADS, dim_head=5), dtype),
                     OWN_BIAS, {"context": OTHERS}, {"mask": VISIBLE.expand(3, -1)}),
         "sgm": Kind(lambda dtype: telling(SgmAttention(CHANNELS, CHANNELS, HEADS), dtype), BIAS, {"context": OTHERS},
                     {"mask": ADDED})}  # fmt: skip
each_host = pytest.mark.parametrize("kind", [pytest.param(kind, id=name) for name, kind in HOSTS.items()])


@each_host
def test_merged_keys_give_what_repeated_keys_give_in_every_precision_and_queries_may_merge_too(kind):
    for dtype in conformance.DTYPES:
        assert way(kind.make(dtype), dtype) == kind.way, dtype
    module = kind.make(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):  # trainers have weights in float32, products in bfloat16
        way(module, tolerance=conformance.TOLERANCE[torch.bfloat16])
    before = dict(vars(module))
    assert way(module, queries=True) == kind.way and vars(module) == before


@each_host
def test_a_call_with_a_mask_or_with_other_tokens_is_left_alone(kind):
    module = kind.make(torch.float32)
    assert "mask" in why_left_alone(module, **kind.mask)
    if kind.context:
        assert "it looks at other tokens than the picture's" in why_left_alone(module, **kind.context)
    for name in kind.context:  # a context that is the picture's own tokens
        assert way(module, **{name: tokens(3)}) == kind.way


@pytest.mark.parametrize("name", PROCESSORS)
def test_heads_scale_and_upcasting_are_the_attentions_own(name):
    upcast = {"upcast_attention": True, "upcast_softmax": True}
    for settings in ({"heads": 1, "dim_head": 40}, {"heads": 8, "dim_head": 5}, {"scale_qk": False}, upcast):
        assert way(of_diffusers(name, **settings)) == PROCESSORS[name], settings
    assert way(of_diffusers(name, torch.bfloat16, **upcast), torch.bfloat16) == PROCESSORS[name]
    assert way(of_diffusers(name), alike=True) == PROCESSORS[name]  # alike: one plan for all samples


def test_a_correction_is_the_same_by_every_processor():
    """The correction is compared for each head, before the output projection."""
    x = F.interpolate(tokens(2, count=16).mT.unflatten(2, (4, 4)), (SIDE, SIDE), mode="bilinear").flatten(2).mT

    def merged(name: str, correction: bool) -> torch.Tensor:
        unet = UNetOf(of_diffusers(name, bias=False))
        with tome_core.patch(unet, side="kv", ratio=0.75, use_rand=False, correction=correction):
            return run(unet, x)

    plain, expected = run(UNetOf(attention()), x), merged("AttnProcessor2_0", True)
    assert conformance.far(expected, plain) < 0.7 * conformance.far(merged("AttnProcessor2_0", False), plain)
    assert all(conformance.far(merged(name, True), expected) < 1e-5 for name in PROCESSORS)


@pytest.mark.parametrize("name", ["AttnProcessor", "AttnProcessor2_0", "FusedAttnProcessor2_0"])
def test_a_hook_on_a_projection_sees_all_tokens_once_and_its_output_counts(name):
    """The patched and the unpatched call, which are compared, each show the hook all tokens."""
    weights, seen = torch.linspace(0.5, 1.5, SIDE**2)[:, None], []

    def hook(layer, args, out):
        seen.append(out.shape[:2])
        return out * weights

    for role in ("to_qkv", "to_out.0") if "Fused" in name else ("to_q", "to_k", "to_v", "to_out.0"):
        module = of_diffusers(name)
        module.get_submodule(role).register_forward_hook(hook)
        seen.clear()
        assert way(module) == PROCESSORS[name] and seen == 2 * [(3, SIDE**2)], role
        seen.clear()
        why_left_alone(module, config=tome_core.MergeConfig(side="kv", ratio=0.01))  # this ratio merges nothing
        assert seen == 2 * [(3, SIDE**2)], role


def processor(call: Any) -> Any:
    return type("Mine", (), {"__call__": call})()


CALLERS = {
    "by a module's name": processor(lambda self, attn, x, *_, **__: flat(
        F.scaled_dot_product_attention(*parts(attn, x)))),
    "by its full name": processor(lambda self, attn, x, *_, **__: flat(
        torch.nn.functional.scaled_dot_product_attention(*parts(attn, x)))),
    "by its own name": processor(lambda self, attn, x, *_, **__: flat(
        scaled_dot_product_attention(*parts(attn, x), scale=0.7))),
    "by a helper of another module": processor(
        lambda self, attn, x, *_, **__: attend(attn.to_q(x), attn.to_k(x), attn.to_v(x), attn.heads)),
    "by diffusers' dispatcher": processor(lambda self, attn, x, *_, **__: dispatch_attention_fn(
        *(tensor.transpose(1, 2) for tensor in parts(attn, x))).flatten(2)),
    "a function": lambda attn, x, *_, **__: flat(F.scaled_dot_product_attention(*parts(attn, x))),
    "by xformers": processor(lambda self, attn, x, *_, **__: xformers.ops.memory_efficient_attention(
        *(tensor.transpose(1, 2) for tensor in parts(attn, x)), attn_bias=None).flatten(2)),
    "by xformers, heads within the batch": processor(
        lambda self, attn, x, *_, **__: flat(xformers.ops.memory_efficient_attention(
            *(tensor.flatten(0, 1) for tensor in parts(attn, x)), op=None).unflatten(0, (-1, attn.heads)))),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLERS)
def test_whatever_its_class_an_attention_is_known_by_the_function_it_calls(name):
    assert way(attention(CALLERS[name])) == (OWN_BIAS if "xformers" in name else BIAS)


def test_the_processor_that_is_in_force_at_a_call_decides():
    """Hosts change processors between steps."""
    module, x = attention(), tokens(2)
    unet = UNetOf(module)
    with conformance.merging_by(), tome_core.patch(unet, KV) as handle:
        expected = run(unet, x)
        module.set_processor(lambda attn, x, **_: AttnProcessor2_0()(attn, x) * 0.5)
        torch.testing.assert_close(run(unet, x), expected * 0.5)
        module.set_processor(AttnProcessor())
        torch.testing.assert_close(run(unet, x), expected, rtol=1e-4, atol=1e-5)
    assert handle.report().levels[0].sized_by == {BIAS: 3}


def test_of_perturbed_guidance_the_part_that_attends_merges():
    """The last third of the batch skips attention, and keeps each token."""
    perturbed, other = UNetOf(of_diffusers("PAGCFGIdentitySelfAttnProcessor2_0")), UNetOf(attention(bias=True))
    x = tokens(6)
    alone = run(perturbed, x)
    with conformance.merging_by(alike=True), tome_core.patch(perturbed, KV) as handle, tome_core.patch(other, KV):
        out, expected = run(perturbed, x), run(other, x[:-2])
    assert handle.report().merged_anything
    assert torch.equal(out[-2:], alone[-2:]) and conformance.far(out[:-2], expected) < 1e-5


TORCHS = torch.nn.functional.scaled_dot_product_attention


def flash_attn_func(q, k, v, **more):
    """flash-attn's function for ``[B, S, H, d]``, which takes no mask."""
    return TORCHS(*(tensor.transpose(1, 2) for tensor in (q, k, v))).transpose(1, 2)


def sageattn(q, k, v, tensor_layout="HND", **more):
    """SageAttention's function, which ignores all further arguments, masks too."""
    return flash_attn_func(q, k, v) if tensor_layout == "NHD" else TORCHS(q, k, v)


def with_mask(change):
    def function(query, key, value, attn_mask=None, **more):
        return TORCHS(query, key, value, None if attn_mask is None else change(attn_mask), **more)

    return function


def refusing(query, key, value, attn_mask=None, **more):
    assert attn_mask is None
    return TORCHS(query, key, value, **more)


def linear(query, key, value, *_, **__):
    return query @ (key.mT @ value) / key.shape[-2]


def of_one_size(query, *args, **kwargs):
    assert query.shape[2] == SIDE**2 and query.shape[0] == 3
    return TORCHS(query, *args, **kwargs)


ADDING = [TORCHS, with_mask(lambda mask: mask)]
NOT_ADDING = [refusing, with_mask(lambda mask: mask * 0.5), with_mask(lambda mask: (mask != 0) * -1e4)]


@pytest.mark.parametrize("name", ["by a module's name", "by diffusers' dispatcher"])
def test_a_function_in_place_of_torchs_is_told_of_sizes_or_torchs_own_is(name, monkeypatch):
    """Each call notices that the function comes or goes."""
    module = attention(CALLERS[name])
    swallowing = [] if name == "by diffusers' dispatcher" else [sageattn]  # it gives a ``scale``
    for functions_of_host, expected in ((ADDING, BIAS), (NOT_ADDING + swallowing, OWN_BIAS), (ADDING, BIAS)):
        for function in functions_of_host:
            monkeypatch.setattr(F, "scaled_dot_product_attention", function)
            assert way(module) == expected, function
    for function in (linear, of_one_size):
        monkeypatch.setattr(F, "scaled_dot_product_attention", function)
        assert "no attention" in why_left_alone(module), function


def test_behind_a_helper_of_another_module_torchs_own_merges_with_what_the_function_in_its_place_has_made(monkeypatch):
    """The other function is called once, with all tokens."""
    module = attention(CALLERS["by a helper of another module"])
    for function in (*ADDING, *NOT_ADDING, of_one_size, lambda q, *rest, **more: TORCHS(q * 1.5, *rest, **more)):
        monkeypatch.setattr(F, "scaled_dot_product_attention", function)
        assert way(module) == BIAS, function
    monkeypatch.setattr(F, "scaled_dot_product_attention", linear)
    assert UNKNOWN in why_left_alone(module)


def by_heads(q, k, v, bias):
    return TORCHS(*(tensor.transpose(1, 2) for tensor in (q, k, v)), bias).transpose(1, 2)


@pytest.mark.parametrize("change", [lambda out: out * 1.5, lambda out: out[:, :1], lambda out: out * float("nan"),
                                    lambda out: 1 / 0])  # fmt: skip
def test_a_function_that_gives_something_else_on_a_few_tokens_is_no_attention(change):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        like = torch.zeros(1, 4, 2, 16, dtype=dtype)
        assert functions.probe_bias("attention", by_heads, 0.25, like)
        assert functions.probe_bias("changed", lambda *given: change(by_heads(*given)), 0.25, like) is None


def test_a_function_is_tried_once_for_its_heads_and_dtype_and_draws_from_no_generator():
    calls, state, like = [], torch.get_rng_state(), torch.zeros(1, 4, 2, 16)
    for key, q in (("name", like), ("name", like), ("name", like[:, :, :1]), ("name", like.half()), ("other", like)):
        functions.probe_bias(key, lambda *given: calls.append(given) or by_heads(*given), 0.25, q)
    assert len(calls) == 8 and torch.equal(torch.get_rng_state(), state)  # without a bias, and with one


@pytest.mark.parametrize("name, expected", [("native", BIAS), ("xformers", BIAS), ("flash", OWN_BIAS),
                                            ("sage", OWN_BIAS)])  # fmt: skip
def test_a_backend_of_diffusers_is_tried_as_a_function_is(name, expected, monkeypatch):
    """The dispatcher, which looks its backend up at each call, is tried."""
    packages = {"flash_attn_func": flash_attn_func, "sageattn": sageattn, "xops": attention_processor.xformers.ops}
    for package, function in packages.items():
        monkeypatch.setattr(attention_dispatch, package, function, raising=False)
    backend = attention_dispatch.AttentionBackendName(name)
    monkeypatch.setattr(attention_dispatch._AttentionBackendRegistry, "_active_backend", backend)
    assert way(attention(CALLERS["by diffusers' dispatcher"])) == expected


def test_scores_by_hand_are_known_by_the_function_that_computes_them_alone():
    """The name of a class is no proof, nor is the name of a function that another function wraps."""

    @functools.wraps(AttnProcessor.__call__)
    def doubled(self, *args, **kwargs):
        return AttnProcessor()(*args, **kwargs) * 2

    module = attention(type("AttnProcessor", (), {"__call__": doubled, "__module__": AttnProcessor.__module__})())
    assert f"AttnProcessor.__call__ {UNKNOWN}" in why_left_alone(module)


@pytest.mark.parametrize(("unusual", "value"), [("group_norm", nn.GroupNorm(4, CHANNELS)),
                                                ("residual_connection", True), ("rescale_output_factor", 2.0)])
def test_by_hand_nothing_merges_beside_other_operations(unusual, value):
    module = of_diffusers("AttnProcessor")
    setattr(module, unusual, value)
    assert "it has a norm, an output scale or a residual connection" in why_left_alone(module)


def test_a_call_that_asks_for_more_than_attention_is_left_alone():
    def asking(change=lambda *given: given, **more):
        def call(attn, x, **_):
            torch.manual_seed(0)
            return flat(F.scaled_dot_product_attention(*change(*parts(attn, x)), **more))

        return attention(call)

    def reason(*change, **more):
        return why_left_alone(asking(*change, **more), config=tome_core.MergeConfig(side="kv"))

    assert "the call also uses" in reason(dropout_p=0.1)
    assert "the call also uses" in reason(is_causal=True)
    assert "mask" in reason(attn_mask=torch.zeros(1, SIDE**2))
    assert "mask" in reason(attn_mask=torch.ones(3, 1, SIDE**2, SIDE**2).tril().bool())
    assert "other tokens" in reason(lambda q, k, v: (q, k[:1], v[:1]))  # one sample serves all
    hides_nothing = torch.ones(3, 1, 1, SIDE**2).bool()
    assert way(asking(attn_mask=hides_nothing)) == BIAS


class LowerTriangularMask:
    """xformers' description of a mask, which is no tensor."""

    def materialize(self, shape, dtype):
        return torch.full(shape, -torch.inf, dtype=dtype).triu(1)


def test_xformers_description_of_a_mask_is_left_alone():
    caller = processor(lambda self, attn, x, *_, **__: xformers.ops.memory_efficient_attention(
        *(tensor.transpose(1, 2) for tensor in parts(attn, x)), attn_bias=LowerTriangularMask()).flatten(2))
    assert "mask" in why_left_alone(attention(caller))


def in_four_forms(q, k, v, heads, mask=None, skip_reshape=False, skip_output_reshape=False):
    """ComfyUI's attention function in its four forms."""
    q, k, v = (tensor if skip_reshape else of_heads(tensor, heads) for tensor in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return out if skip_output_reshape else flat(out)


@pytest.mark.parametrize("skip_reshape", [False, True])
@pytest.mark.parametrize("skip_output_reshape", [False, True])
def test_a_call_by_heads_reads_and_answers_in_the_hosts_form(skip_reshape, skip_output_reshape):
    heads = torch.randn(3, 3, 2, SIDE**2, 4, generator=torch.Generator().manual_seed(0))
    call = HeadsCall(in_four_forms, *(heads if skip_reshape else map(flat, heads)), 2, skip_reshape=skip_reshape,
                     skip_output_reshape=skip_output_reshape)  # fmt: skip
    given = call.q, call.k, call.v
    assert all(map(torch.equal, given, heads.transpose(2, 3)))
    assert torch.equal(call.to_host_form(call.compute(*given, None)), call.unmerged())
