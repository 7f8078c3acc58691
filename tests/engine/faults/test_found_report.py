"""The report tells what was merged, and merging goes on whatever is done to the model's storage; nothing stops quietly.

What is counted is a frame's pixels, and what no rule merges is not touched.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch

import tome_core
from tests.models import BY_NAME, ModelCase, call_case, on_small, small
from tome_core import MergeConfig, MergeRule

MOTION = BY_NAME["motion"]
SIDE = 16 * 8  # pixels of a frame
PRESETS = ("quality", "balanced")

run = partial(call_case, BY_NAME["sd15"], batch=1, timestep=100)
every_preset = pytest.mark.parametrize("name", PRESETS)


# --- the smallest picture of a video ---------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [BY_NAME["sd15"], MOTION, MOTION._replace(frames=3)], ids=["sd15", "two", "three"])
@pytest.mark.parametrize("least, merges", [(SIDE * SIDE, True), (SIDE * SIDE + 1, False)])
def test_the_smallest_picture_is_a_frame_of_a_video(case: ModelCase, least: int, merges: bool):
    """A UNetMotionModel's latent is ``[B, C, F, H, W]``. What is too small is as without a patch."""
    model = case.build()
    plain = call_case(case, model)
    with tome_core.patch(model, MergeConfig(min_pixels=least)) as handle:
        assert torch.equal(call_case(case, model), plain) != merges
    level = handle.report().levels[0]
    assert bool(level.calls_merged) == merges != bool(level.calls_skipped)
    assert any("min_pixels" in reason for reason in level.reasons) != merges


# --- how the weights are stored --------------------------------------------------------------------------------------


@every_preset
def test_weights_that_are_stored_in_half_precision_merge_as_hard(name: str):
    """diffusers' layerwise casting: each layer casts its weights for a call, so that they do not tell what it takes."""
    merged = []
    for stored in (torch.float32, torch.float16):
        model = small()
        if not hasattr(model, "enable_layerwise_casting"):
            pytest.skip("this diffusers has no layerwise casting")
        if stored == torch.float16:
            model.enable_layerwise_casting(storage_dtype=stored, compute_dtype=torch.float32)
        with tome_core.patch(model, on_small(name)) as handle:
            for timestep in (900, 100):
                run(model, timestep=timestep)
        merged.append([(level.tokens, level.routes) for level in handle.report().levels])
    assert merged[0] == merged[1]


# --- nothing but what merges is touched ------------------------------------------------------------------------------


MLP = {"merge_attn": False, "merge_mlp": True}
MLP_ALONE = {
    "everywhere": MergeConfig(max_downsample=8, **MLP),
    "below attention": MergeConfig(rules=(MergeRule(side="kv"), MergeRule(max_downsample=8, **MLP))),
}


@pytest.mark.parametrize("rules", MLP_ALONE)
def test_rules_of_the_mlp_alone_do_not_touch_the_projections_of_an_attention(rules: str):
    """Neither wrapped, nor run more often than without us."""
    model, calls = small(), []
    projections = [
        module
        for name, module in model.mid_block.named_modules()
        if ".attn1." in name and not isinstance(module, torch.nn.ModuleList)
    ]
    before = [sorted(vars(module)) for module in projections]
    for module in projections:
        module.register_forward_pre_hook(lambda module, _: calls.append(module))
    with tome_core.patch(model, MLP_ALONE[rules]) as handle:
        assert not calls and [sorted(vars(module)) for module in projections] == before
        run(model)
    level = handle.report().levels[1]
    assert level.mlp_tokens and not level.tokens and not level.routes
    assert len(calls) == len(set(calls)) == len(projections)
