"""Which way the sizes of merged keys take into an attention, whatever it is and whatever others do to it."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from diffusers.models.attention_processor import AttnProcessor
from tests.sized_attention import everywhere, masked_formula, sides
from tome_core.attention.core import BIAS, WIDER_HEADS
from tome_core.attention.sizes import bias_is_cheaper, bias_of
from torch import nn

import tome_core
from benchmarks.sd_block import CrossAttention, UNet, make_block, make_inputs
from tests.conformance import held, ragged
from tests.families import largest_difference
from tests.models import BY_NAME, call_case
from tome_core import MergeConfig, MergePlan
from tome_core.attention.by_hand import ForwardOnStandIn, register, registry
from tome_core.attention.by_hand import full_name as function_name


class _Apart(CrossAttention):
    def made(self, x, context):
        context = x if context is None else context
        return self.to_q(x), self.to_k(context), self.to_v(context)


class _WidthOfInput(_Apart):
    """Takes the width of its heads from its input, as AUTOMATIC1111's SDPA does."""

    def forward(self, x, context=None):
        shape = (x.shape[0], -1, self.heads, x.shape[-1] // self.heads)
        q, k, v = (part.view(shape).transpose(1, 2) for part in self.made(x, context))
        return self.to_out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class _OwnScale(_Apart):
    """Scales by an attribute; in pieces, with k scaled before."""

    scale = 40**-0.5

    def forward(self, x, context=None):
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.made(x, context))
        k = k * self.scale
        parts = [(piece @ k.transpose(-1, -2)).softmax(-1) @ v for piece in q.split(7, dim=2)]
        return self.to_out(torch.cat(parts, 2).transpose(1, 2).flatten(2))


class _Normed(_Apart):
    """Norms every head's queries: more channels do not fit."""

    def __init__(self, channels, context_channels):
        super().__init__(channels, context_channels)
        self.norm = nn.LayerNorm(channels // self.heads)

    def forward(self, x, context=None, mask=None):
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.made(x, context))
        out = F.scaled_dot_product_attention(self.norm(q), k, v, None if mask is None else mask[:, None])
        return self.to_out(out.transpose(1, 2).flatten(2))


DESCRIBED = {
    _WidthOfInput: ForwardOnStandIn(by_attribute=False),
    _OwnScale: ForwardOnStandIn(by_attribute=True),
}


@pytest.fixture
def described(monkeypatch):
    """As a host, or a user, makes its attentions known."""
    monkeypatch.setattr(registry, "_ENTRIES", dict(registry._ENTRIES))
    monkeypatch.setattr(registry, "_FOUND", {})
    for kind, known in DESCRIBED.items():
        register(function_name(kind.forward), known)


def block_with(attention: type) -> UNet:
    unet = make_block()
    block = unet.input_blocks[0][0].transformer_blocks[0]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        other = attention(320, 320)
    other.load_state_dict(block.attn1.state_dict(), strict=False)
    block.attn1 = other.eval().requires_grad_(False)
    return unet


@sides
@pytest.mark.parametrize("attention", [CrossAttention, *DESCRIBED])
def test_an_attention_that_is_described_knows_the_sizes_of_its_keys(
    attention, side, described, attended, wide_heads
):
    unet, inputs = block_with(attention), make_inputs(8, 2, "cpu", torch.float32)
    with torch.no_grad(), tome_core.patch(unet, everywhere(side)) as handle:
        unet(*inputs)
    assert handle.report().levels[0].routes == {WIDER_HEADS: 1}
    assert f"proportional attention: {WIDER_HEADS}, 1 call" in str(handle.report())
    ((module, plan, _, x, keys, out),) = attended
    with torch.no_grad():
        assert largest_difference(out, masked_formula(module, x, keys, plan.sizes)) <= 1e-5
        assert largest_difference(out, masked_formula(module, x, keys, torch.ones_like(plan.sizes))) > 1e-3


def test_an_attention_that_takes_a_mask_knows_the_sizes_of_its_keys_in_both_ways():
    module = CrossAttention(64, 64, heads=4).requires_grad_(False)
    x, keys = (torch.randn(2, count, 64, generator=torch.Generator().manual_seed(count)) * 4 for count in (12, 5))
    ways = held(lambda one, tokens, context: one(tokens, context), module, x, keys, ragged(2, 40, 5))
    assert ways == {BIAS, WIDER_HEADS}


NOT_KNOWN = "q, k, v together, without sizes, because {} is not known"


@sides
@pytest.mark.parametrize("attention", [_WidthOfInput, _OwnScale, _Normed])
def test_an_attention_that_nobody_described_gets_merged_tokens_and_is_named(
    attention, side, attended, wide_heads, monkeypatch
):
    """Nothing could tell that it does with wider heads what it did before, so it is given none."""
    unet, inputs = block_with(attention), make_inputs(8, 2, "cpu", torch.float32)
    own, seen = attention.forward, []

    def forward(self, x, **more):
        seen.append((x, own(self, x, **more)))
        return seen[-1][1]

    monkeypatch.setattr(attention, "forward", forward)
    with torch.no_grad(), tome_core.patch(unet, everywhere(side, ratio=0.75)) as handle:
        unet(*inputs)
    (level,) = handle.report().levels
    assert not attended and level.routes == {NOT_KNOWN.format(attention.__name__): 1}
    ((x, out),) = seen
    left = 16 if side == "qkv" else 32
    assert level.tokens == ((64, left, left),) and x.shape == out.shape == (2, left, 320)


def test_a_gpu_takes_the_bias_where_a_call_is_small_or_wider_heads_would_cost_more():
    """SDXL's heads of 64 channels would run as wide as 96; SD1.5's 40, 80 and 160 run as 64, 96 and 192 anyhow."""
    calls = ((4096, 256), (16384, 1024), (16384, 2304))
    for width, taken in ((40, [True, False, False]), (80, [True, False, False]), (160, [True, False, False]),
                         (64, [True, True, False]), (128, [True, True, False])):  # fmt: skip
        assert [bias_is_cheaper(tokens, keys, width, "cuda") for tokens, keys in calls] == taken, width
    assert bias_is_cheaper(16384, 2304, 40, "cpu")


def test_a_plan_makes_its_bias_once():
    plan, q = MergePlan(torch.tensor([[0, 0, 1]]), 2), torch.zeros(3, 3, 4)
    first, second = bias_of(plan, q), bias_of(plan, q[:2])
    assert first.shape == (3, 1, 2) and second.shape == (2, 1, 2) and first.data_ptr() == second.data_ptr()
    assert bias_of(plan, q.half()).dtype == torch.float16


@pytest.mark.parametrize("proportional", [True, False])
@pytest.mark.parametrize(("side", "left"), [("kv", 128), ("qkv", 16)])
def test_together_keys_are_not_merged_harder_than_goes_well(side, left, proportional):
    """A rule for keys alone may be strong; one that means all three says how strong."""
    unet, inputs = block_with(_Normed), make_inputs(16, 1, "cpu", torch.float32)
    config = MergeConfig(proportional=proportional, side=side, ratio=0.9375, sx=4, sy=4)
    with torch.no_grad(), tome_core.patch(unet, config) as handle:
        unet(*inputs)
    assert handle.report().levels[0].tokens == ((256, left, left),)


def test_patching_draws_from_no_generator_and_leaves_training_on():
    unet = block_with(CrossAttention)
    unet.input_blocks[0][0].transformer_blocks[0].attn1.to_out = nn.Sequential(nn.Linear(320, 320), nn.Dropout(0.5))
    unet.train()
    state = torch.get_rng_state()
    with tome_core.patch(unet, MergeConfig()) as handle:
        assert torch.equal(torch.get_rng_state(), state)
        assert all(module.training for module in unet.modules())
        unet(*make_inputs(8, 1, "cpu", torch.float32))
    assert handle.report().levels[0].routes == {BIAS: 1}


def test_a_model_that_gets_its_weights_after_the_patch_merges_by_them(wide_heads):
    unet, inputs = make_block(), make_inputs(8, 1, "cpu", torch.float32)
    with torch.no_grad(), tome_core.patch(unet, MergeConfig()):
        expected = unet(*inputs)
    weights = copy.deepcopy(unet.state_dict())
    with torch.no_grad(), tome_core.patch(unet.to("meta"), MergeConfig()) as handle:
        unet.to_empty(device="cpu").load_state_dict(weights)
        assert torch.equal(unet(*inputs), expected)
    assert handle.report().levels[0].routes == {WIDER_HEADS: 1}


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
    "lora": _add_lora,
    "a forward on the projections": _bypass,
    "the plain processor": lambda model: model.set_attn_processor(AttnProcessor()),
    "fused projections": lambda model: model.fuse_qkv_projections(),
}


@pytest.mark.parametrize("way", [WIDER_HEADS, BIAS])
@pytest.mark.parametrize("change", CHANGES.values(), ids=list(CHANGES))
def test_what_changes_after_us_is_noticed(change, way, attended, request):
    if way == WIDER_HEADS:
        request.getfixturevalue("wide_heads")
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
    assert attended
