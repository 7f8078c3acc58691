"""The attentions of CompVis' and Stability AI's own code: merged keys give what repeated keys give.

``ldm`` is the package itself, sgm's attention the double of it, under the name that the engine knows sgm's by.
"""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ldm.modules import attention as ldm_attention
from tests.conformance_diffusers import HEADS, WIDTH
from torch import nn

import tome_core
from tests import conformance as laws
from tests.conformance import tokens
from tests.doubles import SgmAttention
from tests.models import call_ldm, fixed, inputs, ldm
from tests.models import sgm_double as sgm_model
from tome_core import MergeConfig
from tome_core.attention import known_of, name_of

KV = MergeConfig(correction=False, side="kv", ratio=0.75, use_rand=False, max_downsample=8)


def renamed(kind: type, module: str, name: str) -> type:
    """The same class as if another package had it: what the engine goes by is the name of ``forward``."""
    code = kind.forward

    def forward(self, x, context=None, mask=None, **more):
        return code(self, x, context=context, mask=mask, **more)

    forward.__module__, forward.__qualname__ = module, f"{name}.forward"
    return type(name, (kind,), {"__module__": module, "forward": forward})


SGM = "sgm.modules.attention"
KINDS: dict[str, type] = {
    "ldm": ldm_attention.CrossAttention,
    "ldm_xformers": ldm_attention.MemoryEfficientCrossAttention,
    "sgm": renamed(SgmAttention, SGM, "CrossAttention"),
    "sgm_xformers": renamed(ldm_attention.MemoryEfficientCrossAttention, SGM, "MemoryEfficientCrossAttention"),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(autouse=True)
def _xformers(monkeypatch):
    laws.with_xformers(monkeypatch, ldm_attention)


@pytest.fixture
def _as_it_comes(monkeypatch):
    """LDM computes logits in float32 and leaves values as they are, which goes together under CUDA's autocast alone."""
    monkeypatch.setattr(ldm_attention, "_ATTN_PRECISION", "fp16")


def own(module: nn.Module, x: torch.Tensor, context: torch.Tensor | None, **more: Any) -> torch.Tensor:
    """What the class computes, beneath everything; in float64 by the same code."""
    before = ldm_attention._ATTN_PRECISION
    ldm_attention._ATTN_PRECISION = before if x.dtype == torch.float32 else "fp16"
    try:
        return type(module).forward(module, x, context=context, **more)
    finally:
        ldm_attention._ATTN_PRECISION = before


def new(kind: str, channels: int, heads: int, width: int) -> nn.Module:
    if kind == "sgm":
        return fixed(KINDS[kind](channels, heads, heads * width))
    with contextlib.redirect_stdout(io.StringIO()):
        return fixed(KINDS[kind](channels, heads=heads, dim_head=width))


def attention(kind: str, heads: int = HEADS, width: int = 8) -> nn.Module:
    module = new(kind, WIDTH, heads, width)
    with torch.no_grad():
        for layer in (module.to_q, module.to_k):
            layer.weight.mul_(1.5)
    return module


def model_with(kind: str) -> nn.Module:
    """A UNet with attention on two levels and in the middle, every self-attention of this kind."""
    with contextlib.redirect_stdout(io.StringIO()):
        model = sgm_model() if kind == "sgm" else fixed(ldm())
    for path, module in laws.self_attentions(model).items():
        width = module.to_q.in_features
        model.get_submodule(path.removesuffix(".attn1")).attn1 = new(kind, width, HEADS, width // HEADS)
    return model


def call(model: nn.Module, batch: int = 2) -> torch.Tensor:
    x, text = inputs(4, batch, 8, 8)
    with torch.no_grad():
        return call_ldm(model, x, 500, text)


# --- by itself ------------------------------------------------------------------------------------------------------


SHAPES = [(kind, *shape) for kind in KINDS for shape in ((4, 8), (1, 32), (8, 4))]
OTHER_SHAPES = [(kind, *shape) for kind in ("ldm", "ldm_xformers") for shape in ((2, 40), (3, 5))]


@pytest.mark.parametrize(("kind", "heads", "width"), SHAPES + OTHER_SHAPES)
def test_merged_keys_give_what_repeated_keys_give(kind, heads, width):
    """Also where all heads together are wider or narrower than the tokens."""
    laws.held(own, attention(kind, heads, width), tokens(2, 11), tokens(2, 7, seed=1), laws.ragged(2, 60, 7))


@every_kind
@pytest.mark.parametrize("dtype", laws.DTYPES, ids=str)
@pytest.mark.usefixtures("_as_it_comes")
def test_merged_keys_give_it_in_every_dtype(kind, dtype):
    module = attention(kind).to(dtype)
    laws.held(own, module, tokens(2, 11, dtype), tokens(2, 7, dtype, seed=1), laws.ragged(2, 60, 7))


@every_kind
def test_one_query_of_each_of_many_samples_gets_it(kind):
    laws.held(own, attention(kind), tokens(5, 1), tokens(5, 2, seed=1), laws.ragged(5, 40, 2))


@every_kind
@pytest.mark.usefixtures("_as_it_comes")
def test_merged_keys_give_it_under_autocast(kind):
    module, tolerance = attention(kind), laws.TOLERANCE[torch.bfloat16]
    with torch.autocast("cpu", torch.bfloat16):
        laws.held(own, module, tokens(2, 11), tokens(2, 7, seed=1), laws.ragged(2, 60, 7), tolerance)


@every_kind
def test_a_scale_that_was_changed_counts_where_the_class_asks_for_it(kind):
    """LDM's plain attention multiplies by its attribute; the others scale by the width of their heads."""
    module = attention(kind)
    module.scale = 0.7
    before = dict(vars(module))
    laws.held(own, module, tokens(2, 11), tokens(2, 7, seed=1), laws.ragged(2, 60, 7))
    assert vars(module) == before, "the module itself is not changed by a call"


@every_kind
def test_what_was_put_on_projections_counts(kind):
    """LoRA and hypernetworks do it, and both may come between two calls."""
    roles = ["to_q", "to_k", "to_v", "to_out"]
    laws.held_with_hooks(own, lambda: attention(kind), roles, tokens(2, 11), tokens(2, 7, seed=1))


def test_a_class_of_another_package_is_unknown_and_so_is_a_forward_of_its_own():
    class CrossAttention(ldm_attention.CrossAttention):
        def forward(self, x, context=None, mask=None):
            return super().forward(x, context, mask) * 2

    for kind in (CrossAttention, renamed(ldm_attention.CrossAttention, "mine.attention", "CrossAttention")):
        assert known_of(kind(WIDTH)) is None
        assert name_of(kind(WIDTH)) == "CrossAttention"


def test_a_forward_that_a_host_puts_on_the_class_is_unknown(monkeypatch):
    """As the webui does for its choice of cross-attention optimization."""
    module = attention("ldm")
    assert known_of(module) is not None
    monkeypatch.setattr(ldm_attention.CrossAttention, "forward", lambda self, x, context=None, mask=None: x)
    assert known_of(module) is None


# --- in a UNet ------------------------------------------------------------------------------------------------------


@every_kind
@pytest.mark.parametrize("batch", [1, 3])
def test_every_self_attention_of_a_unet_gives_what_repeated_keys_give(kind, batch, monkeypatch):
    laws.merge_by(monkeypatch, 13)
    model = model_with(kind)
    plain = copy.deepcopy(model)
    with tome_core.patch(model, KV) as handle, laws.watched(model) as seen:
        call(model, batch)
    assert len(seen) == len(laws.self_attentions(plain)) == 7
    laws.assert_all_sized(own, plain, seen)
    assert laws.routes_of(handle) and not any("together" in route for route in laws.routes_of(handle)), handle.report()


@every_kind
@pytest.mark.parametrize("config", [MergeConfig(ratio=0.0), MergeConfig(min_timestep=1000)], ids=["ratio_0", "time"])
def test_where_nothing_merges_every_attention_gives_the_same_bits(kind, config):
    model = model_with(kind)
    with laws.watched(model) as plain:
        out = call(model)
    with tome_core.patch(model, config), laws.watched(model) as seen:
        assert torch.equal(call(model), out)
    laws.assert_equal_calls(seen, plain)


@every_kind
def test_a_call_with_other_tokens_than_the_pictures_is_left_alone(kind):
    model = model_with(kind)
    for module in laws.self_attentions(model).values():
        context = torch.randn(2, 9, module.to_q.in_features, generator=torch.Generator().manual_seed(0))
        with_argument(module, lambda x, context=context: {"context": context})
    laws.assert_left_alone(call, model, KV)


def test_blocks_whose_self_attention_is_disabled_are_left_alone():
    with contextlib.redirect_stdout(io.StringIO()):
        model = fixed(ldm(disable_self_attentions=(True, True), disable_middle_self_attn=True))
    laws.assert_left_alone(call, model, KV)


@pytest.mark.parametrize("kind", ["ldm", "sgm"])
def test_a_call_with_a_mask_is_left_alone(kind):
    def masked(x: torch.Tensor) -> dict[str, torch.Tensor]:
        mask = torch.arange(x.shape[1]) < x.shape[1] // 2
        return {"mask": mask.expand(len(x), -1) if kind == "ldm" else mask[None, None, None]}  # sgm: as torch takes it

    model = model_with(kind)
    for module in laws.self_attentions(model).values():
        with_argument(module, masked)
    assert not torch.equal(call(model), call(model_with(kind)))
    laws.assert_left_alone(call, model, KV, "mask")


def with_argument(module: nn.Module, more: Callable[[torch.Tensor], dict[str, Any]]) -> None:
    """From now on the module gets, after its tokens, what follows from them."""
    module.register_forward_pre_hook(
        lambda module, args, kwargs: (args[:1], {**kwargs, **more(args[0])}), with_kwargs=True
    )  # fmt: skip


def test_sgms_additional_tokens_are_kept_apart_from_merged_ones():
    """Only its own forward knows which of the tokens they are."""
    model = model_with("sgm")
    more = {width: torch.randn(2, 3, width, generator=torch.Generator().manual_seed(0)) for width in (32, 64)}
    for module in laws.self_attentions(model).values():
        with_argument(module, lambda x: {"additional_tokens": more[x.shape[2]]})
        assert known_of(module).problem(module, {"additional_tokens": more[module.to_q.in_features]})
    plain = copy.deepcopy(model)
    with tome_core.patch(model, KV) as handle, laws.watched(model) as seen:
        call(model)

    def with_more(module, x, context):
        return own(module, x, context, additional_tokens=more[x.shape[2]])

    laws.assert_all_together(with_more, plain, seen)
    assert all("together" in one and "additional tokens" in one for one in laws.routes_of(handle)), handle.report()


def test_sgms_cross_frame_attention_gets_what_it_was_asked_for():
    """Keys of some samples serve others, which the double refuses: so it must be asked."""
    model = model_with("sgm")
    laws.given(model, n_times_crossframe_attn_in_self=2)
    for patched in (contextlib.nullcontext(), tome_core.patch(model, KV)):
        with patched, pytest.raises(AssertionError):
            call(model)
