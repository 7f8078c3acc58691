"""Merging beside what skips parts of a picture's steps, or asks for more in a step, in whole pictures of diffusers'."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import diffusers
import pytest
import torch
from diffusers import FirstBlockCacheConfig
from diffusers.hooks import PyramidAttentionBroadcastConfig, apply_pyramid_attention_broadcast
from torch import nn

import tome_core
from benchmarks.networks import at_each_call
from tests import models
from tests.beside.models import Beside
from tome_core import MergeConfig, preset
from tome_core.models.unet_blocks import find_blocks

STEPS = [901, 851, 401, 351]
either_order = pytest.mark.parametrize("ours_first", [True, False], ids=["ours first", "theirs first"])


@contextmanager
def deep_cache(pipe: Any) -> Iterator[None]:
    """Every second step is computed deeply."""
    of_deep_cache = pytest.importorskip("DeepCache", reason="DeepCache is not installed: pip install -e '.[test]'")
    helper = of_deep_cache.DeepCacheSDHelper(pipe=pipe)
    helper.set_params(cache_interval=2, cache_branch_id=0)
    helper.enable()
    yield
    helper.disable()


@contextmanager
def broadcast(pipe: Any) -> Iterator[None]:
    """PyramidAttentionBroadcast: every second self-attention, every fourth attention to the prompt.

    A UNet has no `enable_cache`, but the function behind it takes one.
    """
    latest = [0.0]
    apply_pyramid_attention_broadcast(pipe.unet, PyramidAttentionBroadcastConfig(
        spatial_attention_block_skip_range=2, cross_attention_block_skip_range=4,
        current_timestep_callback=lambda: latest[-1],
    ))  # fmt: skip
    with at_each_call(pipe.unet, latest.append):
        yield
    for module in pipe.unet.modules():
        if hasattr(module, "_diffusers_hook"):
            module._diffusers_hook.remove_hook("pyramid_attention_broadcast", recurse=False)


def pipeline(kind: str = "StableDiffusionPipeline", **more: Any) -> Any:
    """Around a UNet of two levels, 16 x 16 tokens at the finest."""
    pipe = getattr(diffusers, kind)(
        vae=None, text_encoder=None, tokenizer=None, safety_checker=None, feature_extractor=None,
        unet=models.fixed(models.unet(layers_per_block=2, attention_head_dim=2)), requires_safety_checker=False, **more,
        scheduler=diffusers.DPMSolverMultistepScheduler(beta_schedule="scaled_linear", steps_offset=1),
    )  # fmt: skip
    pipe.set_progress_bar_config(disable=True)
    return pipe


@torch.no_grad()
def draw(pipe: Any, **call: Any) -> torch.Tensor:
    """The finished latent of four steps."""
    words = torch.randn(2, 7, models.TEXT, generator=torch.Generator().manual_seed(0))[:, None]
    return pipe(prompt_embeds=words[0], negative_prompt_embeds=words[1], timesteps=STEPS, guidance_scale=3.0,
                height=128, width=128, output_type="latent", generator=torch.Generator().manual_seed(0),
                **call).images  # fmt: skip


def balanced(**more: Any) -> MergeConfig:
    """The preset on any grid."""
    return replace(preset("balanced"), only_if_it_pays=False, **more)


@contextmanager
def counted(unet: nn.Module) -> Iterator[list[int]]:
    """How often its blocks really ran, by level."""
    places, runs = find_blocks(unet), [0, 0]

    def note(level: int) -> None:
        runs[level] += 1

    with ExitStack() as stack:
        for place in places:
            hook = place.block.norm1.register_forward_hook(lambda *_, level=place.halvings: note(level))
            stack.callback(hook.remove)
        yield runs


def both(
    theirs: Callable[[Any], AbstractContextManager], ours_first: bool, config: MergeConfig
) -> tuple[torch.Tensor, tome_core.Report, list[int]]:
    """The latent, the report, and how often blocks of each level ran."""
    pipe = pipeline()
    with counted(pipe.unet) as runs, ExitStack() as stack:
        if not ours_first:
            stack.enter_context(theirs(pipe))
        handle = stack.enter_context(tome_core.patch(pipe, config))
        if ours_first:
            stack.enter_context(theirs(pipe))
        return draw(pipe), handle.report(), runs


@pytest.mark.slow
@pytest.mark.parametrize("theirs", [deep_cache, broadcast])
def test_either_order_gives_the_same_bits_and_who_came_first_may_leave_first(theirs):
    (first, report, _), (second, other, _) = (both(theirs, is_first, balanced()) for is_first in (True, False))
    plain = draw(pipe := pipeline())
    handle = tome_core.patch(pipe, balanced())
    with theirs(pipe):
        handle.remove()
        alone = draw(pipe)
    assert torch.equal(draw(pipe), plain)
    with theirs(pipe):
        assert torch.equal(draw(pipe), alone)
    assert torch.equal(first, second) and not torch.equal(first, alone)
    assert report.levels == other.levels or theirs is broadcast


@either_order
@pytest.mark.parametrize("config", [balanced(end_percent=0.4), balanced(ratio=0.0, early_ratio=None)],
                         ids=["early alone", "never"])  # fmt: skip
def test_the_report_counts_blocks_that_ran_while_deep_cache_skips_others(config, ours_first):
    _, report, runs = both(deep_cache, ours_first, config)
    assert 0 < runs[0] < len(STEPS) * report.levels[0].blocks
    for level, ran in zip(report.levels, runs, strict=True):
        assert not level.covered or level.calls_merged + sum(level.reasons.values()) in (0, ran)


@either_order
def test_broadcast_attention_merges_if_it_is_computed(ours_first):
    _, report, runs = both(broadcast, ours_first, balanced())
    for level, ran in zip(report.levels, runs, strict=True):
        assert 0 < level.calls_merged < ran, "some steps take another's output"
        assert level.calls_merged + sum(level.reasons.values()) == ran


def test_perturbed_layers_merge_if_they_attend():
    """Guidance's perturbed copy attends to nothing, the others are asked for in the same call."""
    pipe = pipeline("StableDiffusionPAGPipeline", pag_applied_layers=["up_blocks.1"])
    with tome_core.patch(pipe, balanced()) as handle, counted(pipe.unet) as runs:
        draw(pipe, pag_scale=1.0)
    assert [(level.calls_merged, level.reasons) for level in handle.report().levels] == [(ran, {}) for ran in runs]


@either_order
def test_blocks_that_first_block_cache_skips_are_not_counted_as_merged(ours_first):
    """At a threshold at which only the first block of a second step runs."""
    beside = Beside("Wan")
    plain = beside.draw()
    with ExitStack() as stack:
        stack.callback(beside.model.disable_cache)
        if not ours_first:
            beside.model.enable_cache(FirstBlockCacheConfig(threshold=1e9))
        handle = stack.enter_context(tome_core.patch(beside.model, balanced()))
        if ours_first:
            beside.model.enable_cache(FirstBlockCacheConfig(threshold=1e9))
        with beside.model.cache_context("one"):
            skipped = beside.draw()
        (level,) = handle.report().levels
    assert level.calls_merged == level.blocks + 1
    assert not torch.equal(skipped, plain) and torch.equal(beside.draw(), plain)
