"""Merged keys that know how many tokens they stand for: exact, in every family, by whichever way an attention takes."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from diffusers.models.attention_processor import Attention, AttnProcessor
from torch import nn

import tome_core
from tests.models import CASES, Case, call_case, sd15
from tests.test_patch_contract import every_family, largest_difference, traces
from tome_core import MergeConfig, MergePlan, MergeRule, probe
from tome_core.families import FAMILIES
from tome_core.fold import ProjectionWraps, extra_channels
from tome_core.parts import SelfAttentionSite
from tome_core.probe import FOLDED, MASK, Route, folding_of, key_mask
from tome_core.sd_block import CrossAttention, SpatialTransformer, make_block, make_inputs

BY_NAME = {case.name: case for case in CASES}
sides = pytest.mark.parametrize("side", ["qkv", "kv"])


def everywhere(side: str, **more) -> MergeConfig:
    return MergeConfig(side=side, max_downsample=8, use_rand=False, **more)


def masked_formula(attention: nn.Module, x, keys, sizes, scale: float | None = None) -> torch.Tensor:
    """``to_out(softmax(q k / sqrt(d) + log n) v)`` in float64; sizes: ``[B or 1, G]``."""
    exact = copy.deepcopy(attention).double()
    q, k, v = (
        layer(tokens.double()).unflatten(-1, (exact.heads, -1)).transpose(1, 2)
        for layer, tokens in ((exact.to_q, x), (exact.to_k, keys), (exact.to_v, keys))
    )
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    logits = q @ k.transpose(-1, -2) * scale + sizes.double().log()[:, None, None]
    out = (logits.softmax(-1) @ v).transpose(1, 2).flatten(2)
    for layer in exact.to_out if isinstance(exact.to_out, nn.ModuleList) else [exact.to_out]:
        out = layer(out)
    return out


@pytest.fixture
def attended(monkeypatch) -> list:
    """What every merged self-attention was asked and answered: (attention, plan, route, x, keys, out)."""
    calls = []
    attend = SelfAttentionSite._attend

    def note(site, plan, route, x, kwargs):
        keys = kwargs.get(site.family.context)
        out = attend(site, plan, route, x, dict(kwargs))
        calls.append((site.target, plan, route, x, x if keys is None else keys, out))
        return out

    monkeypatch.setattr(SelfAttentionSite, "_attend", note)
    return calls


@every_family
@sides
def test_every_family_gives_the_masked_formula(case: Case, side: str, attended):
    model = case.build()
    with tome_core.patch(model, everywhere(side)) as handle:
        call_case(case, model)
    levels = handle.report().levels
    assert all(level.routes.keys() == {"folded"} for level in levels)
    calls = [call for call in attended if call[2].kind == FOLDED]  # the others' keys are not the picture's tokens
    assert len(calls) == sum(sum(level.routes.values()) for level in levels) >= len(levels)
    for attention, plan, _, x, keys, out in calls:
        with torch.no_grad():
            expected = masked_formula(attention, x, keys, plan.sizes)
            unsized = masked_formula(attention, x, keys, torch.ones_like(plan.sizes))
        assert largest_difference(out, expected) <= 1e-5 * max(1.0, expected.abs().max().item())
        assert largest_difference(unsized, expected) > 1e-3


@every_family
@sides
def test_patched_twice_copied_pickled_and_removed(case: Case, side: str):
    model = case.build()
    before, vanilla = traces(model), call_case(case, model)
    with tome_core.patch(model, everywhere(side, ratio=0.7)):
        sized = call_case(case, model)
        with tome_core.patch(model, everywhere(side, ratio=0.3)):
            call_case(case, model)
        assert torch.equal(call_case(case, model), sized)
        assert model.state_dict().keys() == case.build().state_dict().keys()
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(call_case(case, other), sized)
            for parameter in other.parameters():
                parameter.data.mul_(1.5)
            assert largest_difference(call_case(case, other), sized) > 1e-3
            tome_core.remove_patch(other)
            assert traces(other) == before
        assert torch.equal(call_case(case, model), sized)
        with tome_core.patch(model, everywhere(side, ratio=0.7, proportional=False)):
            assert largest_difference(call_case(case, model), sized) > 1e-4
    assert traces(model) == before and torch.equal(call_case(case, model), vanilla)


def test_tomesds_arguments_leave_the_sizes_out(attended):
    case = BY_NAME["sd15"]
    call_case(case, tome_core.apply_patch(case.build()))
    assert attended and all(route.kind == "without" and not route.why for _, _, route, _, _, _ in attended)


def test_down_sampling_and_merged_queries_have_nothing_to_tell_keys():
    assert not MergeRule(method="downsample").sizes_keys and not MergeRule(side="q").sizes_keys
    assert MergeRule().sizes_keys and not MergeRule(proportional=False).sizes_keys


# --- half precision, and groups without tokens ------------------------------------------------------------------


def _folded(attention, x, keys, plan) -> torch.Tensor:
    wraps, width = ProjectionWraps(attention), attention.to_q.out_features // attention.heads
    wraps.install()
    extra = extra_channels(width)
    wraps.now.call = folding_of(
        Route(FOLDED, "", width**-0.5, (width + extra) ** -0.5, attention.heads, extra), plan
    )
    try:
        return attention(x, encoder_hidden_states=keys)
    finally:
        wraps.now.call = None
        wraps.uninstall()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [40, 64, 80, 160])
def test_half_precision_is_no_worse_than_a_mask(dtype, width, capsys):
    torch.manual_seed(width)
    attention = Attention(2 * width, heads=2, dim_head=width).requires_grad_(False).to(dtype)
    x, keys = torch.randn(2, 512, 2 * width).to(dtype), torch.randn(2, 128, 2 * width).to(dtype)
    plan = MergePlan((torch.rand(1, 4096) ** 3 * 128).long(), 128)
    expected = masked_formula(attention, x, keys, plan.sizes)
    folded, masked = (
        ((out - expected).norm() / expected.norm()).item()
        for out in (
            _folded(attention, x, keys, plan),
            attention(x, encoder_hidden_states=keys, attention_mask=key_mask(plan, x)),
        )
    )
    with capsys.disabled():
        print(f"\n  {dtype}, width {width}: folded {folded:.1e}, mask {masked:.1e} ", end="")
    # both round alike, and which is closer is chance; a CPU's kernels of torch 2.4 differ by one rounding of float16
    assert folded <= max(1.1 * masked, 1.5 * torch.finfo(torch.float16).eps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_group_without_tokens_weighs_nothing(dtype):
    torch.manual_seed(0)
    attention = Attention(64, heads=4, dim_head=16).requires_grad_(False).to(dtype)
    x, keys = torch.randn(1, 9, 64).to(dtype), torch.randn(1, 5, 64).to(dtype)
    plan = MergePlan(torch.tensor([[0, 0, 2, 2, 2, 4, 4, 4, 4]]), 5)
    out = _folded(attention, x, keys, plan)
    other = keys.clone()
    other[:, [1, 3]] = 30.0
    assert out.isfinite().all() and torch.equal(out, _folded(attention, x, other, plan))


# --- ways ---------------------------------------------------------------------------------------------------------


class _WidthOfInput(CrossAttention):
    """Takes the width of its heads from its input, as AUTOMATIC1111's SDPA does."""

    def forward(self, x, context=None):
        context = x if context is None else context
        q, k, v = (
            part.view(x.shape[0], -1, self.heads, x.shape[-1] // self.heads).transpose(1, 2)
            for part in (self.to_q(x), self.to_k(context), self.to_v(context))
        )
        return self.to_out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class _OwnScale(CrossAttention):
    """Scales by an attribute; in pieces, with k scaled before."""

    scale = 40**-0.5

    def forward(self, x, context=None):
        context = x if context is None else context
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in (self.to_q(x), self.to_k(context) * self.scale, self.to_v(context))
        )
        parts = [(piece @ k.transpose(-1, -2)).softmax(-1) @ v for piece in q.split(7, dim=2)]
        return self.to_out(torch.cat(parts, 2).transpose(1, 2).flatten(2))


class _OneWidth(CrossAttention):
    """Only heads of 40 channels, and a mask."""

    def forward(self, x, context=None, mask=None):
        context = x if context is None else context
        q, k, v = (
            part.view(x.shape[0], -1, self.heads, 40).transpose(1, 2)
            for part in (self.to_q(x), self.to_k(context), self.to_v(context))
        )
        mask = None if mask is None or self.ignores else mask[:, None]
        return self.to_out(F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2))

    ignores = False


class _IgnoresMask(_OneWidth):
    ignores = True


class _Normed(CrossAttention):
    """Norms every head's queries: more channels do not fit."""

    def __init__(self, channels, context_channels):
        super().__init__(channels, context_channels)
        self.norm = nn.LayerNorm(channels // self.heads)

    def forward(self, x, context=None, mask=None):
        context = x if context is None else context
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in (self.to_q(x), self.to_k(context), self.to_v(context))
        )
        mask = None if mask is None else mask[:, None]
        out = F.scaled_dot_product_attention(self.norm(q), k, v, mask)
        return self.to_out(out.transpose(1, 2).flatten(2))


def block_with(attention: type) -> SpatialTransformer:
    block = make_block()
    own = block.transformer_blocks[0].attn1
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        other = attention(320, 320)
    other.load_state_dict(own.state_dict(), strict=False)
    block.transformer_blocks[0].attn1 = other.eval().requires_grad_(False)
    return block


NOTHING_FITS = "without, because it takes neither wider heads nor a mask"


@sides
@pytest.mark.parametrize(
    "attention, way, is_padded",
    [
        (CrossAttention, "folded", False), (_WidthOfInput, "folded", True), (_OwnScale, "folded", False),
        (_OneWidth, "mask", False), (_Normed, "mask", False), (_IgnoresMask, NOTHING_FITS, False),
    ],
)  # fmt: skip
def test_each_attention_takes_the_way_that_was_seen_to_fit(attention, way, is_padded, side, attended):
    block, inputs = block_with(attention), make_inputs(8, 2, "cpu", torch.float32)
    with torch.no_grad(), tome_core.patch(block, everywhere(side)) as handle:
        block(*inputs)
    assert handle.report().levels[0].routes == {way: 1}
    assert f"size-aware keys: {way}, 1 call" in str(handle.report())
    module, plan, route, x, keys, out = attended[0]
    assert route.padded == is_padded
    if attention in (_Normed, _IgnoresMask):
        return
    with torch.no_grad():
        assert largest_difference(out, masked_formula(module, x, keys, plan.sizes)) <= 1e-5


def test_where_nothing_fits_keys_are_not_merged_harder_than_goes_well_without():
    block, inputs = block_with(_IgnoresMask), make_inputs(16, 1, "cpu", torch.float32)
    strong = {"side": "kv", "ratio": 0.9375, "sx": 4, "sy": 4}
    with torch.no_grad():
        for proportional, left in ((True, 64), (False, 16)):
            with tome_core.patch(block, MergeConfig(proportional=proportional, **strong)) as handle:
                block(*inputs)
            assert handle.report().levels[0].tokens == ((256, 256, left),)


def test_asking_draws_from_no_generator_and_leaves_training_on():
    block = block_with(_OwnScale)
    block.transformer_blocks[0].attn1.to_out = nn.Sequential(nn.Linear(320, 320), nn.Dropout(0.5))
    block.train()
    state = torch.get_rng_state()
    with tome_core.patch(block, MergeConfig()) as handle:
        assert torch.equal(torch.get_rng_state(), state)
        assert all(module.training for module in block.modules())
        block(*make_inputs(8, 1, "cpu", torch.float32))
    assert handle.report().levels[0].routes == {"folded": 1}


def test_a_model_without_weights_is_asked_when_it_has_them():
    block = make_block()
    weights = copy.deepcopy(block.state_dict())
    with torch.no_grad(), tome_core.patch(block.to("meta"), MergeConfig()) as handle:
        block.to_empty(device="cpu").load_state_dict(weights)
        block(*make_inputs(8, 1, "cpu", torch.float32))
    assert handle.report().levels[0].routes == {"folded": 1}


def test_memory_that_was_missing_once_is_no_answer(monkeypatch):
    block, inputs = make_block(), make_inputs(8, 1, "cpu", torch.float32)

    def no_memory(*_):
        raise probe.OUT_OF_MEMORY("none left")

    with torch.no_grad(), monkeypatch.context() as for_a_while:
        for_a_while.setattr(probe, "_compare", no_memory)
        handle = tome_core.patch(block, MergeConfig())
        block(*inputs)
    assert handle.report().levels[0].routes == {"without, because there was no memory to try it out": 1}
    handle.reset_counts()
    block(*inputs)
    assert handle.report().levels[0].routes == {"folded": 1}
    handle.remove()


def test_attentions_of_one_kind_are_asked_once(monkeypatch):
    asked = []
    monkeypatch.setattr(tome_core.sized, "find_route", lambda trial, *_: asked.append(trial) or Route(MASK))
    tome_core.patch(BY_NAME["sd15"].build(), MergeConfig())
    assert len(asked) == 1


# --- what others do to the attention after us -------------------------------------------------------------------------


def _add_lora(model):
    from peft import LoraConfig

    torch.manual_seed(0)
    model.add_adapter(LoraConfig(r=2, target_modules=["to_q", "to_k", "to_v", "to_out.0"], init_lora_weights=False))


def _bypass(model):
    """A forward of somebody's own on the projections, which adds to what was there."""
    for name, module in model.named_modules():
        if name.endswith("attn1.to_q"):
            forward = module.forward
            module.forward = lambda x, _forward=forward, _width=module.out_features: _forward(x) + x.new_ones(_width)


CHANGES = {
    "lora": (_add_lora, "folded"),
    "a forward on the projections": (_bypass, "folded"),
    "the plain processor": (lambda model: model.set_attn_processor(AttnProcessor()), "folded"),
    "fused projections": (lambda model: model.fuse_qkv_projections(), "mask"),
}


@pytest.mark.parametrize("change, way", CHANGES.values(), ids=list(CHANGES))
def test_what_changes_after_us_is_noticed(change, way, attended):
    case = BY_NAME["sd15"]
    model, fresh = case.build(), case.build()
    change(fresh)
    vanilla = call_case(case, fresh)
    with tome_core.patch(fresh, everywhere("qkv")):
        expected = call_case(case, fresh)
    handle = tome_core.patch(model, everywhere("qkv"))
    call_case(case, model)
    handle.reset_counts()
    change(model)
    assert largest_difference(call_case(case, model), expected) <= 1e-5
    assert all(level.routes.keys() == {way} for level in handle.report().levels)
    handle.remove()
    assert torch.equal(call_case(case, model), vanilla)
    assert all(attention.to_q.weight.shape == attention.to_k.weight.shape for attention, *_ in attended)


@sides
def test_a_lora_that_comes_and_goes(side):
    case = BY_NAME["sd15"]
    model = case.build()
    handle = tome_core.patch(model, everywhere(side))
    sized = call_case(case, model)
    _add_lora(model)
    assert largest_difference(call_case(case, model), sized) > 1e-3
    model.delete_adapters("default")
    model.unload_lora() if hasattr(model, "unload_lora") else None
    assert largest_difference(call_case(case, model), sized) <= 1e-6
    handle.remove()
    assert not any("forward" in vars(module) for module in model.modules())


def test_an_attention_that_the_call_brings_along_is_left_to_itself():
    case = BY_NAME["comfy_double"]
    model = case.build()
    block = model.model.diffusion_model.input_blocks[1][1].transformer_blocks[0]
    x, text = torch.randn(2, 64, 32), torch.randn(2, 7, 32)
    with torch.no_grad(), tome_core.patch(block_of_its_own(block), everywhere("kv", ratio=0.75)) as handle:
        for options in ({}, {"optimized_attention_override": None}, {"optimized_attention_override": max}):
            handle.unet(x.transpose(1, 2).unflatten(2, (8, 8)), text, options)
    why = "without, because the call brings an attention of its own"
    assert handle.report().levels[0].routes == {"folded": 2, why: 1}


def block_of_its_own(block: nn.Module) -> nn.Module:
    """A transformer around one block of ComfyUI's kind, called as ComfyUI calls it."""

    class SpatialTransformer(nn.Module):
        def __init__(self):
            super().__init__()
            self.transformer_blocks = nn.ModuleList([block])

        def forward(self, x, context, transformer_options):
            return self.transformer_blocks[0](x.flatten(2).transpose(1, 2), context, transformer_options)

    return SpatialTransformer()


def test_families_name_an_argument_that_their_attentions_have():
    import inspect

    ldm, diffusers = FAMILIES
    assert {diffusers.context, diffusers.mask} <= set(inspect.signature(Attention.forward).parameters)
    assert {ldm.context, ldm.mask} <= set(inspect.signature(_OneWidth.forward).parameters)
    assert isinstance(sd15().down_blocks[0].attentions[0].transformer_blocks[0].attn1, Attention)
