"""Which calls that ask the slot are a UNet's self-attentions, at which level, and what is said if none asks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from comfy_nodes import unets
from tests.comfy_attention import CrossAttention
from tests.comfy_doubles import BaseModel, Guider, ModelPatcher, apply, checkpoint, latest, least_checkpoint, sample
from tests.comfy_models import deep_unet
from tests.models import TEXT
from tome_core.reporting.ledger import NO_GRID, REPLACED


def merged(patcher: ModelPatcher, guider: type = Guider, others: dict | None = None, **options):
    """The report on a sampling through the nodes. others: what other nodes put into transformer_options."""
    patcher.model_options["transformer_options"] = others or {}
    applied = apply(patcher, level="up to /8", use_rand=False)
    assert guider(applied).sample(steps=1, **options).isfinite().all()
    return latest(applied).report


def reasons(report) -> dict[str, int]:
    return {why.removeprefix("attn: "): count for why, count in report.reasons.items()}


def test_a_level_that_no_rule_reaches_counts_as_work_once():
    totals = []
    for level in ("up to /1", "up to /8"):
        applied = apply(checkpoint(), level=level)
        sample(applied)
        totals.append(latest(applied).report.work[0])
    assert totals[0] == totals[1]


def forget(h, context, values, options):
    options.pop("activations_shape", None)
    return h, context, values


@pytest.mark.parametrize("others", [{}, {"patches": {"attn1_patch": [forget]}}], ids=["it is told", "the latent's"])
def test_each_block_merges_by_the_grid_that_its_transformer_tells_or_else_by_the_latents(others):
    report = merged(ModelPatcher(BaseModel(deep_unet())), others=others, size=(16, 24))
    assert [level.tokens for level in report.levels] == [((384, 192, 192),), ((96, 48, 48),)]
    assert all(level.calls_merged == level.blocks > 2 and not level.reasons for level in report.levels)


class Wordy(Guider):
    """Its prompt has as many words as the picture has tokens."""

    def _call(self, pair, now):
        self.text = torch.randn(len(pair), pair.shape[2] * pair.shape[3], TEXT)
        return super()._call(pair, now)


def test_attention_to_a_prompt_is_no_self_attention_however_long_it_is_or_if_a_block_has_no_other():
    """disable_self_attn, as upscalers have it: nothing was to merge there, so nothing is said."""
    patcher = least_checkpoint()
    report = merged(patcher, Wordy)
    assert report.calls_merged == report.levels[0].blocks and not report.reasons
    patcher.model.diffusion_model.middle_block[1].transformer_blocks[0].disable_self_attn = True
    report = merged(patcher)
    assert report.calls_merged == report.levels[0].blocks - 1 and not report.reasons


# --- other nodes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "places", "why"), [
    ("attn1", [("middle", 0), ("input", 1, 0)], {REPLACED: 2}), ("attn2", [("middle", 0)], {}),
])  # fmt: skip
def test_a_self_attention_that_another_node_stands_in_for_is_left_alone_and_said(name, places, why):
    """As perturbed-attention guidance does: it wants every token. An attention to the prompt is no loss."""
    asked = []

    def other(q, k, v, extra):
        asked.append((q.shape[1], k.shape[1]))
        return q

    report = merged(least_checkpoint(), Wordy, {"patches_replace": {name: dict.fromkeys(places, other)}})
    calls = sum(why.values())
    assert report.calls_merged == report.levels[0].blocks - calls and reasons(report) == why
    assert report.work_saved == pytest.approx((4 - calls) / 4 * 0.75) and asked == [(64, 64)] * len(places)


def tiles(h, context, values, options):
    """HyperTile's."""
    h = h.unflatten(1, (4, -1)).flatten(0, 1)
    return h, h, h


def halves(h, context, values, options):
    """As TomePatchModel merges queries alone."""
    return h[:, ::2], context, values


@pytest.mark.parametrize(("before", "after", "why"), [
    (tiles, lambda h, options: h.unflatten(0, (-1, 4)).flatten(1, 2), NO_GRID),
    (halves, lambda h, options: h.repeat_interleave(2, 1), unets._OTHER_KEYS),
])  # fmt: skip
def test_tokens_that_a_node_has_changed_first_are_left_whole(before, after, why):
    report = merged(least_checkpoint(), others={"patches": {"attn1_patch": [before], "attn1_output_patch": [after]}})
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
    patcher, over_time, seen = least_checkpoint(), CrossAttention(32, 32, 4), []
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
    patcher = least_checkpoint()
    patcher.model.diffusion_model.forward = lambda x, t, context, transformer_options: x
    report = merged(patcher)
    assert reasons(report) == {REPLACED: report.levels[0].blocks}
    assert not merged(patcher, others={"easycache": SimpleNamespace(name="EasyCache", skip_current_step=True)}).reasons
