"""Which calls that ask the slot are a UNet's self-attentions, at which level, and what is said if none asks."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn

from comfy_nodes import host, unets
from tests.comfy_attention import CrossAttention
from tests.comfy_doubles import BaseModel, Guider, ModelPatcher, apply, checkpoint, least_checkpoint
from tests.comfy_unet import deep_unet
from tests.models import TEXT
from tome_core.reporting.ledger import NO_GRID, REPLACED


class Wordy(Guider):
    """Its prompts have as many words as the picture has tokens."""

    def _call(self, pair, now):
        self.text = torch.randn(len(pair), pair.shape[2] * pair.shape[3], TEXT)
        return super()._call(pair, now)


def merged(patcher: ModelPatcher, guider: type = Guider, **options):
    """The report on a sampling through the nodes."""
    applied = apply(patcher, level="up to /8", use_rand=False)
    assert guider(applied).sample(**{"steps": 1, "size": (8, 8), **options}).isfinite().all()
    return host.find_attached(applied).latest.report


def reasons(report) -> Counter:
    return Counter({one.removeprefix("attn: "): count for one, count in report.reasons.items()})


def with_patches(patcher: ModelPatcher, **patches) -> ModelPatcher:
    patcher.model_options["transformer_options"]["patches"] = patches
    return patcher


def replaced(patcher: ModelPatcher, name: str, function, *places) -> ModelPatcher:
    patcher.model_options["transformer_options"]["patches_replace"] = {name: dict.fromkeys(places, function)}
    return patcher


def forget(h, context, values, options):
    del options["activations_shape"]
    return h, context, values


@pytest.mark.parametrize("patches", [{}, {"attn1_patch": [forget]}], ids=["the shape is told", "the latent's"])
def test_each_level_merges_by_the_grid_that_its_transformer_tells_or_else_by_the_latents(patches):
    fine, coarse = merged(with_patches(checkpoint(), **patches), size=(16, 24)).levels
    assert fine.tokens == ((384, 192, 192),) and coarse.tokens == ((96, 48, 48),)
    assert fine.calls_merged == fine.blocks and coarse.calls_merged == coarse.blocks
    assert not fine.reasons and not coarse.reasons


def test_every_block_of_a_transformer_has_matches_of_its_own():
    report = merged(ModelPatcher(BaseModel(deep_unet())), size=(16, 16))
    assert all(level.calls_merged == level.blocks > 2 for level in report.levels)


def test_a_level_that_no_rule_reaches_is_a_part_of_the_whole():
    reports = []
    for values in ({}, {"level": "up to /8"}):
        applied = apply(checkpoint(), correction=False, **values)
        Guider(applied).sample(steps=1)
        reports.append(host.find_attached(applied).latest.report)
    fine, coarse = reports[0].levels
    assert fine.calls_merged and not coarse.covered and not coarse.reasons and coarse.work_saved == 0
    assert reports[0].work[0] == reports[1].work[0] and reports[0].work_saved < fine.work_saved == 0.75


def test_a_prompt_of_as_many_words_as_the_picture_has_tokens_is_no_picture():
    """Nor is it taken for a self-attention that another node stands in for."""
    patcher = least_checkpoint()
    for left_out in (0, 1):
        report = merged(patcher, Wordy)
        assert report.calls_merged == report.levels[0].blocks - left_out
        assert reasons(report) == ({REPLACED: 1} if left_out else {})
        replaced(patcher, "attn1", lambda q, k, v, extra: v, ("middle", 0))


# --- other nodes -----------------------------------------------------------------------------------------------------


def test_a_self_attention_that_another_node_stands_in_for_is_left_alone_and_said():
    """As perturbed-attention guidance does: it wants every token, and may ask for attention itself."""
    asked = []

    def other(q, k, v, extra):
        asked.append(q.shape[1])
        return v

    report = merged(replaced(least_checkpoint(), "attn1", other, ("middle", 0), ("input", 1, 0)))
    assert asked == [64, 64] and reasons(report) == {REPLACED: 2}
    assert report.calls_merged == report.levels[0].blocks - 2 and report.work_saved == pytest.approx(0.5 * 0.75)


def test_a_prompts_attention_that_another_node_stands_in_for_is_the_nodes():
    seen = []

    def other(q, k, v, extra):
        seen.append((q.shape[1], k.shape[1]))
        return q

    report = merged(replaced(least_checkpoint(), "attn2", other, ("middle", 0)))
    assert seen == [(64, 7)] and report.calls_merged == report.levels[0].blocks and not report.reasons


def test_tokens_that_a_node_has_changed_first_are_left_whole():
    """HyperTile cuts tokens into tiles, TomePatchModel merges queries alone."""

    def tiles(h, context, values, options):
        h = h.unflatten(1, (4, -1)).flatten(0, 1)
        return h, h, h

    def halves(h, context, values, options):
        return h[:, ::2], context, values

    for before, after, why in (
        (tiles, lambda h, options: h.unflatten(0, (-1, 4)).flatten(1, 2), NO_GRID),
        (halves, lambda h, options: h.repeat_interleave(2, 1), unets._OTHER_KEYS),
    ):
        report = merged(with_patches(least_checkpoint(), attn1_patch=[before], attn1_output_patch=[after]))
        assert reasons(report) == {why: report.levels[0].blocks} and not report.merged_anything


def test_of_a_picture_that_a_node_makes_smaller_on_the_way_its_own_grid_counts():
    """As Kohya's Deep Shrink does."""
    patcher = least_checkpoint()
    block = patcher.model.diffusion_model.middle_block
    for place, change in ((0, nn.AvgPool2d(2)), (4, nn.Upsample(scale_factor=2))):
        block.insert(place, change)
    (level,) = merged(patcher, size=(8, 12)).levels
    assert set(level.tokens) == {(96, 48, 48), (24, 12, 12)} and not level.reasons


class OverTime(nn.Module):
    """What films put behind a block: an attention of frames, which tells the options of the block before it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention, self.seen = CrossAttention(width, 4), []

    def run(self, x, options):
        tokens = x.flatten(2).permute(2, 0, 1)  # [places, frames, C]
        self.seen.append(tokens.shape[1])
        return self.attention(tokens, transformer_options=options).permute(1, 2, 0).reshape(x.shape)


@pytest.mark.parametrize("frames", [4, 64], ids=["few", "as many as places"])
def test_frames_do_not_merge(frames):
    """As SVD's time stacks and AnimateDiff's motion."""
    patcher = least_checkpoint()
    transformer = patcher.model.diffusion_model.input_blocks[1][1]
    added, forward = OverTime(32), transformer.forward
    transformer.forward = lambda x, context, options: forward(x, context, options) + added.run(x, options)
    report = merged(patcher, batch=frames // 2)
    assert added.seen == [frames] and not report.reasons and report.calls_merged == report.levels[0].blocks


def test_what_answers_in_the_models_place_is_counted_as_not_merged_unless_easycache_leaves_out_the_step():
    class EasyCacheHolder:
        name, skip_current_step = "EasyCache", True

    patcher = least_checkpoint()
    patcher.model.diffusion_model.forward = lambda x, t, context, transformer_options: x
    report = merged(patcher)
    assert reasons(report) == {REPLACED: report.levels[0].blocks}
    patcher.model_options["transformer_options"]["easycache"] = EasyCacheHolder()
    assert not merged(patcher).reasons


def test_attention_to_the_prompt_alone_is_no_self_attention():
    """disable_self_attn, as upscalers have it: nothing was to merge there, so nothing is said."""
    patcher = least_checkpoint()
    block = patcher.model.diffusion_model.middle_block[1].transformer_blocks[0]
    block.disable_self_attn = True
    report = merged(patcher)
    assert not report.reasons and report.calls_merged == report.levels[0].blocks - 1
