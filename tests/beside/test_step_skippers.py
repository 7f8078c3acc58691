"""Merging beside what skips parts of a picture's steps, or asks for more in a step, in whole pictures of diffusers'."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import diffusers
import pytest
import torch
from diffusers.hooks import FirstBlockCacheConfig, apply_first_block_cache
from torch import nn

import tome_core
from benchmarks.networks import first_block_cache
from tests import models
from tests.beside import savers
from tests.beside.models import Beside
from tome_core import MergeConfig, preset
from tome_core.models.unet_blocks import find_blocks

STEPS = [901, 851, 401, 351]
DEEP_CACHE = pytest.param(savers.deep_cache, id="DeepCache")
BROADCAST = pytest.param(savers.broadcast, id="PyramidAttentionBroadcast")
PAG = {"kind": "StableDiffusionPAGPipeline", "pag_applied_layers": ["up_blocks.1"]}
either_order = pytest.mark.parametrize("ours_first", [True, False], ids=["ours first", "theirs first"])


@pytest.fixture(autouse=True)
def deep_cache_is_there():
    pytest.importorskip("DeepCache", reason="DeepCache is not installed: pip install -e '.[test]'")


@pytest.fixture(scope="module")
def unet() -> nn.Module:
    """Two levels, 16 x 16 tokens at the finest."""
    return models.fixed(models.unet(layers_per_block=2, attention_head_dim=2))


def pipeline(unet: nn.Module, kind: str = "StableDiffusionPipeline", **more: Any) -> Any:
    pipe = getattr(diffusers, kind)(
        vae=None, text_encoder=None, tokenizer=None, unet=unet, safety_checker=None, feature_extractor=None,
        requires_safety_checker=False, **more,
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
    places = find_blocks(unet)
    levels = sorted({place.halvings for place in places})
    runs = [0] * len(levels)
    with ExitStack() as stack:
        for place in places:
            def note(*_: Any, level: int = levels.index(place.halvings)) -> None:
                runs[level] += 1

            stack.enter_context(place.block.norm1.register_forward_hook(note))
        yield runs


def both(
    unet: nn.Module, theirs: savers.PutOn, ours_first: bool, config: MergeConfig
) -> tuple[torch.Tensor, tome_core.Report, list[int]]:
    """The latent, the report, and how often blocks of each level ran."""
    pipe = pipeline(unet)
    with counted(unet) as runs, ExitStack() as stack:
        if not ours_first:
            stack.enter_context(theirs(pipe))
        handle = stack.enter_context(tome_core.patch(pipe, config))
        if ours_first:
            stack.enter_context(theirs(pipe))
        return draw(pipe), handle.report(), runs


@pytest.mark.slow
@pytest.mark.parametrize("theirs", [DEEP_CACHE, BROADCAST])
def test_either_order_gives_the_same_bits_and_who_came_first_may_leave_first(unet, theirs):
    (first, told, _), (second, again, _) = (both(unet, theirs, is_first, balanced()) for is_first in (True, False))
    pipe = pipeline(unet)
    plain = draw(pipe)
    handle = tome_core.patch(pipe, balanced())
    with theirs(pipe):
        handle.remove()
        alone = draw(pipe)
    assert torch.equal(draw(pipe), plain)
    with theirs(pipe):
        assert torch.equal(draw(pipe), alone)
    assert torch.equal(first, second) and not torch.equal(first, alone)
    assert told.levels == again.levels or theirs is savers.broadcast


@either_order
@pytest.mark.parametrize("config", [balanced(end_percent=0.4), balanced(ratio=0.0, early_ratio=None)],
                         ids=["early alone", "never"])  # fmt: skip
def test_the_report_counts_blocks_that_ran_while_deep_cache_skips_others(unet, config, ours_first):
    _, told, runs = both(unet, savers.deep_cache, ours_first, config)
    assert 0 < runs[0] < len(STEPS) * told.levels[0].blocks
    for level, ran in zip(told.levels, runs, strict=True):
        assert not level.covered or level.calls_merged + sum(level.reasons.values()) in (0, ran)


@either_order
def test_broadcast_attention_merges_if_it_is_computed(unet, ours_first):
    _, told, runs = both(unet, savers.broadcast, ours_first, balanced())
    for level, ran in zip(told.levels, runs, strict=True):
        assert 0 < level.calls_merged < ran, "some steps take another's output"
        assert level.calls_merged + sum(level.reasons.values()) == ran


def test_perturbed_layers_merge_if_they_attend(unet):
    """Guidance's perturbed copy attends to nothing, the others are asked for in the same call."""
    pipe = pipeline(unet, **PAG)
    with tome_core.patch(pipe, balanced()) as handle, counted(unet) as runs:
        draw(pipe, pag_scale=1.0)
        told = handle.report()
    assert [(level.calls_merged, level.reasons) for level in told.levels] == [(ran, {}) for ran in runs]


@either_order
def test_blocks_that_first_block_cache_skips_are_not_counted_as_merged(ours_first):
    """At a threshold at which only the first block of a second step runs."""
    beside = Beside("Wan")
    plain = beside.draw()
    with ExitStack() as stack:
        theirs = first_block_cache(beside.model, 1e9)
        if not ours_first:
            stack.enter_context(theirs)
        handle = stack.enter_context(tome_core.patch(beside.model, balanced()))
        if ours_first:
            stack.enter_context(theirs)
        with beside.model.cache_context("one"):
            skipped = beside.draw()
        (level,) = handle.report().levels
    assert level.calls_merged == level.blocks + 1
    assert not torch.equal(skipped, plain) and torch.equal(beside.draw(), plain)


def test_first_block_cache_takes_no_unet():
    """What docs/benchmarks.md says of it; should a newer diffusers take a UNet, a law of it belongs here."""
    unet = models.unet()
    assert not hasattr(unet, "enable_cache")
    with pytest.raises(IndexError):
        apply_first_block_cache(unet, FirstBlockCacheConfig(threshold=0.1))
