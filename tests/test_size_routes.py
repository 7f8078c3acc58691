"""Which way an attention takes the sizes of merged keys: the one that was seen to fit, whatever others do to it."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from diffusers.models.attention_processor import Attention, AttnProcessor
from torch import nn

import tome_core
from tests.models import CASES, call_case, sd15
from tests.sized_attention import attended, everywhere, masked_formula, sides, wide_heads  # noqa: F401
from tests.test_patch_contract import largest_difference
from tome_core import MergeConfig, MergePlan, probe, sized
from tome_core.families import FAMILIES
from tome_core.probe import FOLDED, MASK, Route, key_mask
from tome_core.sd_block import CrossAttention, SpatialTransformer, make_block, make_inputs

BY_NAME = {case.name: case for case in CASES}


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


class _MaskOfHeads(CrossAttention):
    """A mask's first axis counts heads, as in sgm. There are as many of them as a trial has samples."""

    def __init__(self, channels, context_channels):
        super().__init__(channels, context_channels)
        self.heads = 2

    def forward(self, x, context=None, mask=None):
        context = x if context is None else context
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in (self.to_q(x), self.to_k(context), self.to_v(context))
        )
        return self.to_out(F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2))


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
        (_MaskOfHeads, "folded", False),
    ],
)  # fmt: skip
def test_each_attention_takes_the_way_that_was_seen_to_fit(
    attention, way, is_padded, side, attended, wide_heads  # noqa: F811
):
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


@pytest.mark.parametrize("attention, way", [(CrossAttention, "mask"), (_OwnScale, "folded"), (_MaskOfHeads, "folded")])
def test_a_cpu_takes_the_mask_where_it_fits_too(attention, way):
    block, inputs = block_with(attention), make_inputs(8, 2, "cpu", torch.float32)
    with torch.no_grad(), tome_core.patch(block, everywhere("kv")) as handle:
        block(*inputs)
    assert handle.report().levels[0].routes == {way: 1}


def test_a_gpu_takes_the_mask_where_a_call_is_small():
    both, wide = Route(FOLDED, masked=True), Route(FOLDED)
    ways = [sized.for_size(both, tokens, keys, "cuda").kind for tokens, keys in ((4096, 256), (16384, 1024))]
    assert ways == [MASK, FOLDED]
    assert sized.for_size(both, 16384, 1024, "cpu").kind == MASK
    assert sized.for_size(wide, 4096, 256, "cuda") is sized.for_size(wide, 4096, 256, "cpu") is wide


def test_a_plan_makes_its_mask_once():
    plan, x = MergePlan(torch.tensor([[0, 0, 1]]), 2), torch.zeros(3, 3, 4)
    first, second = key_mask(plan, x), key_mask(plan, x[:2])
    assert first.shape == (3, 1, 2) and second.shape == (2, 1, 2) and first.data_ptr() == second.data_ptr()
    assert key_mask(plan, x.half()).dtype == torch.float16


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


def test_a_model_without_weights_is_asked_when_it_has_them(wide_heads):  # noqa: F811
    block = make_block()
    weights = copy.deepcopy(block.state_dict())
    with torch.no_grad(), tome_core.patch(block.to("meta"), MergeConfig()) as handle:
        block.to_empty(device="cpu").load_state_dict(weights)
        block(*make_inputs(8, 1, "cpu", torch.float32))
    assert handle.report().levels[0].routes == {"folded": 1}


def test_memory_that_was_missing_once_is_no_answer(monkeypatch, wide_heads):  # noqa: F811
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
def test_what_changes_after_us_is_noticed(change, way, attended, wide_heads):  # noqa: F811
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
@pytest.mark.parametrize("wide", [True, False])
def test_a_lora_that_comes_and_goes(side, wide, request):
    if wide:
        request.getfixturevalue("wide_heads")
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


def test_an_attention_that_the_call_brings_along_is_left_to_itself(wide_heads):  # noqa: F811
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
