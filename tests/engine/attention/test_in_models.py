"""Every self-attention of every family of UNets, seen from outside: merged keys give what repeated keys give."""

from __future__ import annotations

import copy

import pytest
import torch
from diffusers.models.attention_processor import AttnProcessor
from ldm.modules import attention as ldm_attention
from torch import nn

import tome_core
from benchmarks.sd_block import make_block, make_inputs
from tests.conformance import GROUPS, KV, assert_repeated, far, merging_by, ragged, watched
from tests.families import every_family_in_time, largest_difference
from tests.models import BY_NAME, ModelCase, call_case
from tome_core import MergeConfig
from tome_core.attention.merged import BIAS, OWN_BIAS
from tome_core.models.unet_blocks import find_blocks, find_unet

QKV = MergeConfig(ratio=0.75, correction=False, use_rand=False, max_downsample=8)
sides = pytest.mark.parametrize("config", [KV, QKV], ids=["kv", "qkv"])


def self_attentions(unet: nn.Module) -> list[str]:
    """Paths of those over the picture's tokens."""
    places = (place for place in find_blocks(unet) if not getattr(place.block, "disable_self_attn", False))
    return [f"{place.path}.attn1" for place in places]


@pytest.fixture
def _exact(monkeypatch):
    """LDM's plain attention casts its logits to float32, and of float64 it makes nothing."""
    monkeypatch.setattr(ldm_attention, "_ATTN_PRECISION", "fp16")


@every_family_in_time
@sides
@pytest.mark.usefixtures("_exact")
def test_every_self_attention_of_every_family_gives_what_repeated_keys_give(case: ModelCase, config: MergeConfig):
    model = case.build()
    unet = find_unet(model)
    plain, names = copy.deepcopy(unet), self_attentions(unet)
    with merging_by(), tome_core.patch(model, config) as handle, watched(unet, names) as seen:
        call_case(case, model)
    assert [one.name for one in seen] == names
    for one in seen:
        batch, count, _ = one.args[0].shape
        plan = ragged(batch, count, GROUPS)
        assert_repeated(plain.get_submodule(one.name), one.args, one.told, one.out, plan, queries=config is QKV)
    levels = handle.report().levels
    assert sum(level.calls_merged for level in levels) == len(names)
    by_hand = case.name.startswith("ldm")
    assert all(level.routes.keys() == {OWN_BIAS if by_hand else BIAS} for level in levels)


def test_without_proportional_attention_no_key_weighs_more():
    case = BY_NAME["sd15"]
    model = case.build()
    with merging_by(), tome_core.patch(model, KV, proportional=False) as handle:
        unsized = call_case(case, model)
    with merging_by(), tome_core.patch(model, KV):
        assert far(call_case(case, model), unsized) > 1e-3
    assert handle.report().merged_anything and not handle.report().routes


def test_patching_draws_from_no_generator_and_leaves_training_on():
    unet, inputs = make_block(), make_inputs(8, 1, "cpu", torch.float32)
    attention = unet.input_blocks[0][0].transformer_blocks[0].attn1
    attention.to_out = nn.Sequential(attention.to_out, nn.Dropout(0.5))
    unet.train()
    state = torch.get_rng_state()
    with tome_core.patch(unet, MergeConfig()) as handle:
        assert torch.equal(torch.get_rng_state(), state)
        assert all(module.training for module in unet.modules())
        unet(*inputs)
    assert handle.report().levels[0].routes == {BIAS: 1}


def test_a_model_that_gets_its_weights_after_the_patch_merges_by_them():
    unet, inputs = make_block(), make_inputs(8, 1, "cpu", torch.float32)
    with torch.no_grad(), tome_core.patch(unet, MergeConfig()):
        expected = unet(*inputs)
    weights = copy.deepcopy(unet.state_dict())
    with torch.no_grad(), tome_core.patch(unet.to("meta"), MergeConfig()) as handle:
        unet.to_empty(device="cpu").load_state_dict(weights)
        assert torch.equal(unet(*inputs), expected)
    assert handle.report().levels[0].routes == {BIAS: 1}


# --- what others do to an attention after us --------------------------------------------------------------------------


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
    "scores by hand": lambda model: model.set_attn_processor(AttnProcessor()),
    "fused projections": lambda model: model.fuse_qkv_projections(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=list(CHANGES))
def test_what_changes_after_us_is_noticed(change):
    case = BY_NAME["sd15"]
    model, fresh = case.build(), case.build()
    change(fresh)
    vanilla = call_case(case, fresh)
    with tome_core.patch(fresh, QKV):
        expected = call_case(case, fresh)
    handle = tome_core.patch(model, QKV)
    call_case(case, model)
    handle.reset_counts()
    change(model)
    assert largest_difference(call_case(case, model), expected) <= 1e-5
    assert all(level.routes.keys() == {BIAS} for level in handle.report().levels)
    handle.remove()
    assert torch.equal(call_case(case, model), vanilla)
