"""Merging with DeepCache, FirstBlockCache or perturbed attention guidance, in whole pictures."""

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import diffusers
import pytest
import torch
from diffusers import FirstBlockCacheConfig
from torch import nn

import tome_core
from tests.beside.models import Beside
from tests.small_models import unets
from tests.thoroughness import some_quick
from tome_core import MergeConfig
from tome_core.models.unet_blocks import find_blocks

STEPS = [901, 851, 401, 351]
BALANCED = unets.on_small("balanced")


@contextmanager
def deep_cache(pipe: Any) -> Iterator[None]:
    """DeepCache, which computes every second step in full."""
    of_deep_cache = pytest.importorskip("DeepCache", reason="DeepCache is not installed: pip install -e '.[test]'")
    helper = of_deep_cache.DeepCacheSDHelper(pipe=pipe)
    helper.set_params(cache_interval=2, cache_branch_id=0)
    helper.enable()
    yield
    helper.disable()


def pipeline(kind: str = "StableDiffusionPipeline", **more: Any) -> Any:
    """A pipeline around a UNet of two levels, 16 x 16 tokens at the finest."""
    pipe = getattr(diffusers, kind)(
        vae=None, text_encoder=None, tokenizer=None, safety_checker=None, feature_extractor=None,
        unet=unets.fixed(unets.unet(layers_per_block=2, attention_head_dim=2)), requires_safety_checker=False, **more,
        scheduler=diffusers.DPMSolverMultistepScheduler(beta_schedule="scaled_linear", steps_offset=1))  # fmt: skip
    pipe.set_progress_bar_config(disable=True)
    return pipe


@torch.no_grad()
def draw(pipe: Any, **call: Any) -> torch.Tensor:
    words = torch.randn(2, 7, unets.TEXT, generator=torch.Generator().manual_seed(0))[:, None]
    return pipe(prompt_embeds=words[0], negative_prompt_embeds=words[1], timesteps=STEPS, guidance_scale=3.0,
                height=128, width=128, output_type="latent", generator=torch.Generator().manual_seed(0), **call).images


@contextmanager
def counted(unet: nn.Module) -> Iterator[Counter]:
    """Count how often the blocks of a UNet run, by level."""
    runs: Counter = Counter()
    with ExitStack() as stack:
        for place in find_blocks(unet):
            hook = place.block.norm1.register_forward_hook(lambda *_, level=place.halvings: runs.update([level]))
            stack.callback(hook.remove)
        yield runs


def both(ours_first: bool, config: MergeConfig) -> tuple[torch.Tensor, Any, list[int]]:
    """Return the latent with DeepCache and our patch, the report on each level, and how often its blocks ran."""
    pipe = pipeline()
    with counted(pipe.unet) as runs, ExitStack() as stack:
        if not ours_first:
            stack.enter_context(deep_cache(pipe))
        handle = stack.enter_context(tome_core.patch(pipe, config))
        if ours_first:
            stack.enter_context(deep_cache(pipe))
        return draw(pipe), handle.report().levels, [runs[0], runs[1]]


@pytest.mark.parametrize("changes", some_quick([{"end_percent": 0.4}, {"ratio": 0.0, "early_ratio": None}]),
                         ids=["early alone", "never"])  # fmt: skip
def test_the_report_counts_blocks_that_ran_and_either_order_gives_the_same_bits(changes: dict[str, Any]):
    config = replace(BALANCED, **changes)
    first, second = both(True, config), both(False, config)
    assert torch.equal(first[0], second[0]) and first[1:] == second[1:]
    _, levels, runs = first
    assert 0 < runs[0] < len(STEPS) * levels[0].blocks
    for level, ran in zip(levels, runs, strict=True):
        assert not level.covered or level.calls_merged + sum(level.reasons.values()) in (0, ran)


def test_perturbed_layers_merge_if_they_attend():
    """Guidance's perturbed copy does not attend; the same call computes the other copies."""
    pipe = pipeline("StableDiffusionPAGPipeline", pag_applied_layers=["up_blocks.1"])
    with tome_core.patch(pipe, BALANCED) as handle, counted(pipe.unet) as runs:
        draw(pipe, pag_scale=1.0)
    assert [(level.calls_merged, level.reasons) for level in handle.report().levels] == [(runs[0], {}), (runs[1], {})]


@pytest.mark.parametrize("ours_first", [True, False])
def test_blocks_that_first_block_cache_skips_are_not_counted_as_merged(ours_first):
    """At this threshold only the first block of a second step runs."""
    beside = Beside("Wan")
    plain = beside.draw()
    with ExitStack() as stack:
        stack.callback(beside.model.disable_cache)
        if not ours_first:
            beside.model.enable_cache(FirstBlockCacheConfig(threshold=1e9))
        handle = stack.enter_context(tome_core.patch(beside.model, BALANCED))
        if ours_first:
            beside.model.enable_cache(FirstBlockCacheConfig(threshold=1e9))
        with beside.model.cache_context("one"):
            skipped = beside.draw()
        (level,) = handle.report().levels
    assert level.calls_merged == level.blocks + 1
    assert not torch.equal(skipped, plain) and torch.equal(beside.draw(), plain)
