"""Which calls that ask the slot are a UNet's self-attentions, at which level, and what is said if none asks."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn

from comfy_nodes import unets
from tests.comfy_attention import CrossAttention
from tests.comfy_doubles import BaseModel, Guider, ModelPatcher, apply, checkpoint, latest, least_checkpoint
from tests.comfy_models import deep_unet
from tests.models import TEXT
from tome_core.reporting.ledger import NO_GRID, REPLACED


def merged(patcher: ModelPatcher, guider: type = Guider, **options):
    """The report on a sampling through the nodes."""
    applied = apply(patcher, level="up to /8", use_rand=False)
    assert guider(applied).sample(**{"steps": 1, "size": (8, 8), **options}).isfinite().all()
    return latest(applied).report


def reasons(report) -> Counter:
    return Counter({why.removeprefix("attn: "): count for why, count in report.reasons.items()})


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
        reports.append(latest(applied).report)
    fine, coarse = reports[0].levels
    assert fine.calls_merged and not coarse.covered and not coarse.reasons and coarse.work_saved == 0
    assert reports[0].work[0] == reports[1].work[0] and reports[0].work_saved < fine.work_saved == 0.75


def test_a_prompt_of_as_many_words_as_the_picture_has_tokens_is_no_picture():
    """Nor is it taken for a self-attention that another node stands in for."""

    class Wordy(Guider):
        def _call(self, pair, now):
            self.text = torch.randn(len(pair), pair.shape[2] * pair.shape[3], TEXT)
            return super()._call(pair, now)

    patcher = least_checkpoint()
    for left_out in (0, 1):
        report = merged(patcher, Wordy)
        assert report.calls_merged == report.levels[0].blocks - left_out
        assert reasons(report) == ({REPLACED: 1} if left_out else {})
        replaced(patcher, "attn1", lambda q, k, v, extra: v, ("middle", 0))


def test_attention_to_the_prompt_alone_is_no_self_attention():
    """disable_self_attn, as upscalers have it: nothing was to merge there, so nothing is said."""
    patcher = least_checkpoint()
    patcher.model.diffusion_model.middle_block[1].transformer_blocks[0].disable_self_attn = True
    report = merged(patcher)
    assert not report.reasons and report.calls_merged == report.levels[0].blocks - 1


# --- other nodes -----------------------------------------------------------------------------------------------------


def test_a_self_attention_that_another_node_stands_in_for_is_left_alone_and_said():
    """As perturbed-attention guidance does: it wants every token. An attention to the prompt is no loss."""
    asked = []

    def other(q, k, v, extra):
        asked.append((q.shape[1], k.shape[1]))
        return q

    report = merged(replaced(least_checkpoint(), "attn1", other, ("middle", 0), ("input", 1, 0)))
    assert asked == [(64, 64)] * 2 and reasons(report) == {REPLACED: 2}
    assert report.calls_merged == report.levels[0].blocks - 2 and report.work_saved == pytest.approx(0.5 * 0.75)
    report = merged(replaced(least_checkpoint(), "attn2", other, ("middle", 0)))
    assert asked[2:] == [(64, 7)] and report.calls_merged == report.levels[0].blocks and not report.reasons


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


@pytest.mark.parametrize("frames", [4, 64], ids=["few", "as many as places"])
def test_frames_do_not_merge(frames):
    """What films put behind a block, an attention of frames, tells the options of the block before it."""
    patcher, over_time, seen = least_checkpoint(), CrossAttention(32, 4), []
    transformer = patcher.model.diffusion_model.input_blocks[1][1]
    forward = transformer.forward

    def with_frames(x, context, options):
        out, tokens = forward(x, context, options), x.flatten(2).permute(2, 0, 1)  # [places, frames, C]
        seen.append(tokens.shape[1])
        return out + over_time(tokens, transformer_options=options).permute(1, 2, 0).reshape(x.shape)

    transformer.forward = with_frames
    report = merged(patcher, batch=frames // 2)
    assert seen == [frames] and not report.reasons and report.calls_merged == report.levels[0].blocks


def test_what_answers_in_the_models_place_is_counted_as_not_merged_unless_easycache_leaves_out_the_step():
    class EasyCacheHolder:
        name, skip_current_step = "EasyCache", True

    patcher = least_checkpoint()
    patcher.model.diffusion_model.forward = lambda x, t, context, transformer_options: x
    report = merged(patcher)
    assert reasons(report) == {REPLACED: report.levels[0].blocks}
    patcher.model_options["transformer_options"]["easycache"] = EasyCacheHolder()
    assert not merged(patcher).reasons
