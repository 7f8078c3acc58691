"""A call keeps the patch and rules with which it began: in its middle a hook lets a thread act, and waits for it."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import tome_core
from tests.small_models.families import MODELS
from tests.small_models.least_pipeline import Pipeline, picture
from tests.small_models.unets import Family, on_small
from tests.thoroughness import THOROUGH
from tests.watching.threads import at_once
from tests.watching.traces import is_idle
from tome_core import MergeConfig, MergeRule

BALANCED, LESS = on_small("balanced"), MergeConfig(ratio=0.3, max_downsample=8)
TOMESD = MergeConfig(ratio=0.5, merge_mlp=True, proportional=False)
# a place in the first block, after its first attention, and in an attention, of either kind of model
PLACES = {"sd15": ("down_blocks.0.attentions.0.transformer_blocks.0.attn2",
                   "mid_block.attentions.0.transformer_blocks.0.attn1.to_k"),
          "Flux": ("single_transformer_blocks.0", "single_transformer_blocks.1.attn.to_k")}  # fmt: skip

at_every_place = pytest.mark.parametrize(("family", "place"), [
    pytest.param(MODELS[name], place, marks=[pytest.mark.slow] * (name == "Flux" and place != places[0]))
    for name, places in PLACES.items() for place in places], ids=lambda it: getattr(it, "name", it))  # fmt: skip


def merged(family: Family, config: MergeConfig | None, **call: Any) -> torch.Tensor:
    """The picture of a fresh model with a patch that has seen no other; None: without a patch."""
    model = family.build()
    if config is not None:
        tome_core.patch(model, config)
    return family.call(model, **call)


def once_in(model: nn.Module, place: str, work: Callable[[], Any]) -> None:
    """Do this work once, before the next call of the module at this place."""

    def hook(*_: Any) -> None:
        handle.remove()
        work()

    handle = model.get_submodule(place).register_forward_pre_hook(hook)


@at_every_place
def test_a_call_during_which_another_patch_comes_or_this_one_goes_and_the_next_one(family: Family, place: str):
    """No patch waits for the call. After a change of parts or a removal, the rest of the call does not merge."""
    model = family.build()
    for before, after, stays in ((None, BALANCED, True), (None, TOMESD, True), (BALANCED, LESS, True),
                                 (BALANCED, None, False), (TOMESD, None, False), (TOMESD, BALANCED, False),
                                 (BALANCED, TOMESD, False)):  # fmt: skip
        tome_core.remove_patch(model)
        handle = None if before is None else tome_core.patch(model, before)
        change = handle.uninstall if after is None else partial(tome_core.patch, model, after)
        once_in(model, place, partial(at_once, change))
        drawn = family.call(model)
        assert torch.equal(drawn, merged(family, before)) if stays else drawn.isfinite().all()
        assert handle is None or (is_idle(handle) and handle.report().calls == 1)
        assert torch.equal(family.call(model), merged(family, after))


@at_every_place
def test_a_model_called_again_inside_of_its_own_call_gives_both_pictures(family: Family, place: str):
    """Hooks of reference-only and perturbed guidance call the model so."""
    model, pictures = family.build(), []
    with tome_core.patch(model, BALANCED):
        once_in(model, place, lambda: pictures.append(family.call(model, timestep=900)))
        pictures.append(family.call(model))
    for drawn, timestep in zip(pictures, (900, 500), strict=True):
        assert torch.equal(drawn, merged(family, BALANCED, timestep=timestep))


@at_every_place
def test_a_call_keeps_its_rules_when_another_thread_tells_the_time(family: Family, place: str):
    model, config = family.build(), MergeConfig(ratio=0.75, min_timestep=500.0)
    with tome_core.patch(model, config) as handle:
        once_in(model, place, partial(at_once, partial(handle.set_time, timestep=900)))
        assert torch.equal(family.call(model, timestep=100), merged(family, None, timestep=100))
        assert handle.report().levels[0].reasons and not handle.report().merged_anything


def test_two_models_in_two_threads_give_their_own_pictures():
    def pictures(config: MergeConfig) -> list[torch.Tensor]:
        with tome_core.patch(pipe := Pipeline(), config):
            return [picture(pipe) for _ in range(30 if THOROUGH else 5)]

    kept = MergeRule(side="kv", sx=4, sy=4, ratio=0.9, refine=1, seed=5)
    works = [partial(pictures, config) for config in (TOMESD, MergeConfig(rules=(kept,)))]
    alone = [work()[0] for work in works]
    for expected, together in zip(alone, at_once(*works, interval=1e-5), strict=True):
        assert all(torch.equal(drawn, expected) for drawn in together)
