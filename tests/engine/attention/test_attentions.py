"""Every attention that hosts call, in one table: merged keys give what repeated keys give, else it is left alone.

The engine knows no class of attentions or processors, but the function that their code calls; or, if they compute their
scores by hand, a description of the function that does.
"""

from __future__ import annotations

import contextlib
import functools
import io
from collections.abc import Callable, Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from diffusers.models import attention_processor
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.attention_processor import AttnProcessor, AttnProcessor2_0
from ldm.modules import attention as ldm_attention
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

import tome_core
from tests import conformance
from tests.conformance import CHANNELS, HEADS, KV, SIDE, UNetOf, attention, run, telling, tokens, way, why_left_alone
from tests.doubles import SgmAttention, attend, of_heads
from tests.models import fixed
from tome_core.attention import by_hand
from tome_core.attention.by_hand import ForwardOnStandIn, full_name, register
from tome_core.attention.merged import BIAS, OWN_BIAS
from tome_core.models.intercept import way_of

xformers = SimpleNamespace()  # a test puts one here
UNKNOWN = "calls no attention function that is known"


@pytest.fixture(autouse=True)
def _hosts(monkeypatch):
    """xformers is there, LDM's plain attention is as exact as its input, and a host describes attentions of its own."""
    conformance.with_xformers(monkeypatch, attention_processor, ldm_attention)
    monkeypatch.setitem(globals(), "xformers", attention_processor.xformers)
    monkeypatch.setattr(ldm_attention, "_ATTN_PRECISION", "fp16")
    monkeypatch.setattr(by_hand, "_ENTRIES", dict(by_hand._ENTRIES))
    register(full_name(OwnScale.forward), ForwardOnStandIn(by_attribute=True))
    register(full_name(Masked.forward), Adding(by_attribute=False))


# --- attentions of hosts ----------------------------------------------------------------------------------------------


class Projections(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads, self.scale = HEADS, 0.3
        self.to_q, self.to_k, self.to_v = (nn.Linear(CHANNELS, CHANNELS, bias=False) for _ in range(3))
        self.to_out = nn.Sequential(nn.Linear(CHANNELS, CHANNELS), nn.Dropout(0.0))

    def parts(self, x: torch.Tensor, context: torch.Tensor | None) -> list[torch.Tensor]:
        context = x if context is None else context
        return [of_heads(one, self.heads) for one in (self.to_q(x), self.to_k(context), self.to_v(context))]


class OwnScale(Projections):
    """Scales by an attribute; in pieces, with k scaled before; takes the output projection apart."""

    def forward(self, x, context=None):
        q, k, v = self.parts(x, context)
        k = k * self.scale
        parts = [(piece @ k.transpose(-1, -2)).softmax(-1) @ v for piece in q.split(7, dim=2)]
        projection, dropout = self.to_out
        return dropout(projection(torch.cat(parts, 2).transpose(1, 2).flatten(2)))


class Masked(Projections):
    """Cuts heads by the width of its input, and adds a mask."""

    def forward(self, x, context=None, mask=None, picky=False):
        q, k, v = self.parts(x, context)
        logits = q @ k.transpose(-1, -2) * (x.shape[-1] // self.heads) ** -0.5
        return self.to_out(((logits if mask is None else logits + mask).softmax(-1) @ v).transpose(1, 2).flatten(2))


class Adding(ForwardOnStandIn):
    adds_bias = True


class Picky(Adding):
    def problem(self, module: nn.Module, kwargs: dict[str, Any]) -> str | None:
        return "it is picky" if kwargs.get("picky") else None


class Kind(NamedTuple):
    """An attention. make: of a dtype; way: how it is told of sizes; context, mask: what its call takes, if it does."""

    make: Callable[[torch.dtype], nn.Module]
    way: str
    context: Mapping[str, Any] = MappingProxyType({})
    mask: Mapping[str, Any] = MappingProxyType({})


def of_ldm(kind: type, dtype: torch.dtype, heads: int = HEADS, width: int = CHANNELS // HEADS) -> nn.Module:
    with contextlib.redirect_stdout(io.StringIO()):
        return telling(kind(CHANNELS, heads=heads, dim_head=width), dtype)


def of_diffusers(name: str, dtype: torch.dtype = torch.float32, **settings: Any) -> nn.Module:
    """An attention with a processor of this name, which may have weights of its own."""
    kind = getattr(attention_processor, name)
    if name.startswith("CustomDiffusion"):
        processor = fixed(kind(train_kv=True, train_q_out=True, hidden_size=CHANNELS), seed=1)
    else:
        processor = kind(3) if name.startswith("Sliced") else kind()
    return attention(processor, dtype, **{"bias": True, **settings})


VISIBLE = torch.arange(SIDE**2) < 40
ADDED = torch.where(VISIBLE, 0.0, -10.0)[None, None, None]
OTHERS = tokens(3, count=20, seed=1)
PROCESSORS = {
    "AttnProcessor": BIAS,  # by hand, as the next
    "SlicedAttnProcessor": BIAS,
    "AttnProcessor2_0": BIAS,
    "XFormersAttnProcessor": OWN_BIAS,
    "FusedAttnProcessor2_0": BIAS,  # takes no context
    "CustomDiffusionAttnProcessor2_0": BIAS,  # projections of its own
    "CustomDiffusionXFormersAttnProcessor": OWN_BIAS,
}
PLAIN = list(PROCESSORS)[:5]  # attention and nothing else
BY_HAND = PLAIN[:2]
OF_DIFFUSERS = {
    name: Kind(functools.partial(of_diffusers, name), PROCESSORS[name],
               {"encoder_hidden_states": OTHERS} if name in PLAIN[:4] else {},
               {"attention_mask": ADDED[0].expand(3, -1, -1)} if name in PLAIN else {}) for name in PROCESSORS
}  # fmt: skip
HOSTS = OF_DIFFUSERS | {
    "ldm": Kind(functools.partial(of_ldm, ldm_attention.CrossAttention), OWN_BIAS, {"context": OTHERS},
                {"mask": VISIBLE.expand(3, -1)}),
    "ldm, xformers": Kind(functools.partial(of_ldm, ldm_attention.MemoryEfficientCrossAttention), OWN_BIAS,
                          {"context": OTHERS}),
    "sgm": Kind(lambda dtype: telling(SgmAttention(CHANNELS, HEADS, CHANNELS), dtype), BIAS, {"context": OTHERS},
                {"mask": ADDED}),
    "described, scaling by an attribute": Kind(lambda dtype: telling(OwnScale(), dtype), OWN_BIAS, {"context": OTHERS}),
    "described, adding a mask": Kind(lambda dtype: telling(Masked(), dtype), BIAS, {"context": OTHERS},
                                     {"mask": ADDED}),
}  # fmt: skip
each_host = pytest.mark.parametrize("kind", [pytest.param(kind, id=name) for name, kind in HOSTS.items()])


@each_host
def test_merged_keys_give_what_repeated_keys_give_in_every_precision_and_queries_may_merge_too(kind):
    for dtype in conformance.DTYPES:
        assert way(kind.make(dtype), dtype) == kind.way, dtype
    module = kind.make(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):  # as trainers run it: weights in float32, products in bfloat16
        way(module, tolerance=conformance.TOLERANCE[torch.bfloat16])
    before = dict(vars(module))
    assert way(module, queries=True) == kind.way and vars(module) == before


def test_the_oracle_sees_sizes_that_are_forgotten():
    for dtype in conformance.DTYPES:
        with pytest.raises(AssertionError, match="off by"):
            way(attention(dtype=dtype), dtype, settings={"proportional": False})


@each_host
def test_a_call_with_a_mask_or_with_other_tokens_is_left_alone(kind):
    module = kind.make(torch.float32)
    if kind.mask:
        assert not torch.equal(run(UNetOf(module, **kind.mask), tokens(3)), run(UNetOf(module), tokens(3)))
        assert "mask" in why_left_alone(module, **kind.mask)
    if kind.context:
        assert "keys and values are not the picture's tokens" in why_left_alone(module, **kind.context)
    for name in kind.context:  # the tokens themselves
        assert way(module, **{name: tokens(3)}) == kind.way


@pytest.mark.parametrize("name", PLAIN)
def test_heads_scale_and_upcasting_are_the_attentions_own(name):
    upcast = {"upcast_attention": True, "upcast_softmax": True}
    for settings in ({"heads": 1, "dim_head": 40}, {"heads": 8, "dim_head": 5}, {"scale_qk": False}, upcast):
        assert way(of_diffusers(name, **settings)) == PROCESSORS[name], settings
    assert way(of_diffusers(name, torch.bfloat16, **upcast), torch.bfloat16) == PROCESSORS[name]
    assert way(of_diffusers(name), alike=True) == PROCESSORS[name]  # one plan for all samples


@pytest.mark.parametrize("kind", [ldm_attention.CrossAttention, ldm_attention.MemoryEfficientCrossAttention])
def test_ldms_heads_may_be_wider_or_narrower_than_its_tokens_and_its_scale_is_its_own(kind):
    for heads, width in ((2, 40), (3, 5)):
        assert way(of_ldm(kind, torch.float32, heads, width)) == OWN_BIAS
    module = of_ldm(kind, torch.float32)
    module.scale = 0.7  # the plain attention multiplies by it; the other scales by the width of its heads
    assert way(module) == OWN_BIAS


def test_a_correction_is_the_same_by_every_processor():
    """Each head's, before the output projection."""
    x = F.interpolate(tokens(2, count=16).mT.unflatten(2, (4, 4)), (SIDE, SIDE), mode="bilinear").flatten(2).mT

    def merged(name: str, correction: bool) -> torch.Tensor:
        unet = UNetOf(of_diffusers(name, bias=False))
        with tome_core.patch(unet, side="kv", ratio=0.75, use_rand=False, correction=correction):
            return run(unet, x)

    plain, expected = run(UNetOf(attention()), x), merged("AttnProcessor2_0", True)
    assert conformance.far(expected, plain) < 0.7 * conformance.far(merged("AttnProcessor2_0", False), plain)
    assert all(conformance.far(merged(name, True), expected) < 1e-5 for name in PLAIN)


@pytest.mark.parametrize("name", ["AttnProcessor", "AttnProcessor2_0", "FusedAttnProcessor2_0"])
def test_a_hook_on_a_projection_sees_all_tokens_once_and_its_output_counts(name):
    weights, seen = torch.linspace(0.5, 1.5, SIDE**2)[:, None], []

    def hook(layer, args, out):
        seen.append(out.shape[:2])
        return out * weights

    for role in ("to_qkv", "to_out.0") if "Fused" in name else ("to_q", "to_k", "to_v", "to_out.0"):
        module = of_diffusers(name)
        module.get_submodule(role).register_forward_hook(hook)
        for config in (KV, tome_core.MergeConfig(side="kv", ratio=0.01)):  # the latter merges too little to begin
            seen.clear()
            unet = UNetOf(module)
            with tome_core.patch(unet, config) as handle:
                run(unet, tokens(2))
            assert seen == [(2, SIDE**2)] and handle.report().merged_anything == (config is KV), role
        assert way(module) == PROCESSORS[name]


# --- known by its function, whatever its class ------------------------------------------------------------------------


def parts(attn: Any, x: torch.Tensor) -> list[torch.Tensor]:
    """``[B, H, N, d]``."""
    return [of_heads(layer(x), attn.heads) for layer in (attn.to_q, attn.to_k, attn.to_v)]


def flat(out: torch.Tensor) -> torch.Tensor:
    return out.transpose(1, 2).flatten(2)


def processor(call: Any, **attributes: Any) -> Any:
    """Of a class of its own, whose code this is."""
    return type("Mine", (), {"__call__": call, **attributes})()


def by_module(self, attn, x, *_, **__):
    return attn.to_out[0](flat(F.scaled_dot_product_attention(*parts(attn, x))))


def by_dispatch(self, attn, x, *_, **__):
    return dispatch_attention_fn(*(one.transpose(1, 2) for one in parts(attn, x))).flatten(2)


def inside_a_function(self, attn, x, *_, **__):
    def inside(one):
        return (lambda: F.scaled_dot_product_attention(*parts(attn, one), scale=0.7))()

    return flat(inside(x))


def by_xformers(self, attn, x, *_, **__):
    q, k, v = (one.transpose(1, 2) for one in parts(attn, x))
    return xformers.ops.memory_efficient_attention(q, k, v, attn_bias=None).flatten(2)


def by_xformers_and_flat(self, attn, x, *_, **__):
    """Heads lie within the batch."""
    out = xformers.ops.memory_efficient_attention(*(one.flatten(0, 1) for one in parts(attn, x)), op=None)
    return flat(out.unflatten(0, (-1, attn.heads)))


def a_function(attn, x, *_, **__):
    return flat(F.scaled_dot_product_attention(*parts(attn, x)))


class Halved(AttnProcessor2_0):
    """By its name, and in part, it is diffusers'."""

    __qualname__ = __name__ = "AttnProcessor2_0"

    def __call__(self, attn, x, *args, **kwargs):
        return super().__call__(attn, x, *args, **kwargs) * 0.5


CALLERS = {
    "by a module's name": processor(by_module),
    "by its full name": processor(lambda self, attn, x, *_, **__: flat(
        torch.nn.functional.scaled_dot_product_attention(*parts(attn, x)))),
    "by its own name": processor(lambda self, attn, x, *_, **__: flat(scaled_dot_product_attention(*parts(attn, x)))),
    "by a helper of another module": processor(
        lambda self, attn, x, *_, **__: attend(attn.to_q(x), attn.to_k(x), attn.to_v(x), attn.heads)),
    "by a method": processor(lambda self, *args, **more: self.attend(*args, **more), attend=by_module),
    "by diffusers' dispatcher": processor(by_dispatch),
    "inside a function": processor(inside_a_function),
    "decorated": processor(torch.no_grad()(by_module)),
    "derived": Halved(),
    "derived, by hand": type("Mine", (AttnProcessor,), {})(),
    "with slots": processor(by_module, __slots__=("scale",)),
    "a function": a_function,
    "a partial function": functools.partial(a_function),
    "by xformers": processor(by_xformers),
    "by xformers and flat": processor(by_xformers_and_flat),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLERS)
def test_whatever_its_class_an_attention_is_known_by_the_function_it_calls(name):
    assert way(attention(CALLERS[name])) == (OWN_BIAS if "xformers" in name else BIAS)


def test_code_that_names_its_function_is_run_with_another_in_its_place_and_is_not_watched():
    """Which is slower, and which no compiler follows."""
    modules = [*(kind.make(torch.float32) for name, kind in OF_DIFFUSERS.items() if name not in BY_HAND),
               HOSTS["ldm, xformers"].make(torch.float32), attention(CALLERS["inside a function"])]  # fmt: skip
    assert all(way_of(module) is not None for module in modules)


def test_arguments_of_a_call_get_there():
    """InvokeAI's come with each call."""

    class InvokeAIs(AttnProcessor2_0):
        def __call__(self, attn, x, encoder_hidden_states=None, attention_mask=None, *, percent_through):
            assert percent_through == 0.5
            return flat(F.scaled_dot_product_attention(*parts(attn, x)))

    assert way(attention(InvokeAIs()), percent_through=0.5) == BIAS


_calls = 0


def to_a_global(self, attn, x, *_, **__):
    """As StoryDiffusion's."""
    global _calls
    _calls += 1
    return flat(F.scaled_dot_product_attention(*parts(attn, x)))


def to_itself(self, attn, x, *_, **__):
    self.calls = 1
    return flat(F.scaled_dot_product_attention(*parts(attn, x)))


def to_the_attention(self, attn, x, *_, **__):
    attn.calls = 1
    return flat(F.scaled_dot_product_attention(*parts(attn, x)))


@pytest.mark.parametrize("call", [to_a_global, to_itself, to_the_attention])
def test_what_an_attentions_code_writes_is_there_after_a_merged_call(call, monkeypatch):
    monkeypatch.setitem(globals(), "_calls", 0)
    module = attention(processor(call))
    unet = UNetOf(module)
    with conformance.merging_by(), tome_core.patch(unet, KV) as handle:
        run(unet, tokens(1))
    assert handle.report().merged_anything
    written = {to_a_global: _calls, to_itself: vars(module.processor).get("calls"), to_the_attention: vars(module)}
    assert written[call] == 1 or written[call]["calls"] == 1


def test_the_processor_that_is_in_force_at_a_call_decides():
    """Hosts change them between steps."""
    module, x = attention(), tokens(2)
    unet = UNetOf(module)
    with conformance.merging_by(), tome_core.patch(unet, KV) as handle:
        expected = run(unet, x)
        module.set_processor(Halved())
        torch.testing.assert_close(run(unet, x), expected * 0.5)
        module.set_processor(AttnProcessor())
        torch.testing.assert_close(run(unet, x), expected, rtol=1e-4, atol=1e-5)
    assert handle.report().levels[0].sized_by == {BIAS: 3}


def test_code_that_a_host_puts_on_the_class_counts(monkeypatch):
    """As the webui does for its choice of cross-attention optimization."""
    kind = ldm_attention.CrossAttention
    module = of_ldm(kind, torch.float32)
    monkeypatch.setattr(kind, "forward", ldm_attention.MemoryEfficientCrossAttention.forward)
    module.attention_op, module.dim_head = None, CHANNELS // HEADS
    assert way(module) == OWN_BIAS
    monkeypatch.setattr(kind, "forward", lambda self, x, context=None, mask=None: x)
    assert UNKNOWN in why_left_alone(module)


@pytest.mark.parametrize("name, parts_of_batch", [
    ("PAGIdentitySelfAttnProcessor2_0", 2), ("PAGCFGIdentitySelfAttnProcessor2_0", 3),
])  # fmt: skip
def test_of_perturbed_guidance_the_part_that_attends_merges(name, parts_of_batch):
    """The last part of a batch, of so many, is not attended at all, each token as it is."""
    x, perturbed, other = tokens(2 * parts_of_batch), UNetOf(of_diffusers(name)), UNetOf(attention(bias=True))
    alone = run(perturbed, x)
    with conformance.merging_by(alike=True), tome_core.patch(perturbed, KV) as handle, tome_core.patch(other, KV):
        out, expected = run(perturbed, x), run(other, x[:-2])
    assert handle.report().merged_anything
    assert torch.equal(out[-2:], alone[-2:]) and conformance.far(out[:-2], expected) < 1e-5


# --- left alone -------------------------------------------------------------------------------------------------------


def test_scores_by_hand_without_a_description_are_left_alone_and_the_function_is_named():
    assert f"CustomDiffusionAttnProcessor.__call__ {UNKNOWN}" in why_left_alone(
        of_diffusers("CustomDiffusionAttnProcessor")
    )


@pytest.mark.parametrize("body", [AttnProcessor.__call__, AttnProcessor2_0.__call__], ids=["by hand", "by function"])
def test_scores_by_hand_are_known_by_the_function_that_computes_them_alone(body):
    """Neither the name of a class is a proof, nor that of a function that another one wraps."""

    @functools.wraps(body)
    def doubled(self, *args, **kwargs):
        return body(self, *args, **kwargs) * 2

    module = attention(type("AttnProcessor", (), {"__call__": doubled, "__module__": AttnProcessor.__module__})())
    if body is AttnProcessor2_0.__call__:
        assert way(module) == BIAS
    else:
        assert UNKNOWN in why_left_alone(module)


@pytest.mark.parametrize("name", BY_HAND)
def test_by_hand_nothing_merges_beside_other_operations(name):
    norm = fixed(nn.GroupNorm(4, CHANNELS))
    for unusual, value in {"group_norm": norm, "residual_connection": True, "rescale_output_factor": 2.0}.items():
        module = of_diffusers(name)
        setattr(module, unusual, value)
        assert "it has a norm, an output scale or a residual connection" in why_left_alone(module), unusual


def test_a_second_description_takes_the_place_of_the_first_and_may_refuse_a_call():
    register(full_name(Masked.forward), Picky(by_attribute=False))
    assert way(telling(Masked()), picky=False) == BIAS
    assert "it is picky" in why_left_alone(telling(Masked()), picky=True)


def test_sgms_additional_tokens_are_left_alone():
    """Only its own forward knows which of the tokens they are."""
    module = HOSTS["sgm"].make(torch.float32)
    assert "the tokens are not the picture's grid" in why_left_alone(module, additional_tokens=tokens(3, count=3))


class Asking:
    """Asks its function for more, of parts that are changed."""

    def __init__(self, change=lambda *own: own, **more):
        self.change, self.more = change, more

    def __call__(self, attn, x, *_, **__):
        torch.manual_seed(0)
        return flat(F.scaled_dot_product_attention(*self.change(*parts(attn, x)), **self.more))


def test_a_call_that_asks_for_more_than_attention_is_left_alone():
    def reason(*change, **more):
        return why_left_alone(attention(Asking(*change, **more)), config=tome_core.MergeConfig(side="kv"))

    assert "the call also uses" in reason(dropout_p=0.1)
    assert "the call also uses" in reason(is_causal=True)
    assert "mask" in reason(attn_mask=torch.zeros(1, SIDE**2))
    assert "mask" in reason(attn_mask=torch.ones(3, 1, SIDE**2, SIDE**2).tril().bool())
    assert "keys and values" in reason(lambda q, k, v: (q, k[:1], v[:1]))  # of one sample for all
    hides_nothing = torch.ones(3, 1, 1, SIDE**2).bool()
    assert way(attention(Asking(attn_mask=hides_nothing))) == BIAS


def test_values_of_another_width_than_keys_merge_without_a_correction():
    def wider(attn, x, **_):
        q, k, v = parts(attn, x)
        return flat(F.scaled_dot_product_attention(q, k, torch.cat([v, -v], -1)).chunk(2, -1)[1])

    unet, pictures = UNetOf(attention(wider)), []
    for correction in (True, False):
        with tome_core.patch(unet, side="kv", use_rand=False, correction=correction) as handle:
            pictures.append(run(unet, tokens(2)))
        assert handle.report().merged_anything
    assert torch.equal(*pictures)
