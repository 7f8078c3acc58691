"""An error, an interrupt or a full memory at every place where the patch stands in leaves nothing patched.

The places are those of the patch itself, asked from its handle, so a new kind of wrap is in here without a word.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tome_core
from tests.injected_faults import KINDS, MOST_ERRORS, Fault, places
from tests.least_pipeline import Pipeline, picture
from tests.thoroughness import THOROUGH
from tests.traces import is_idle, traces
from tome_core import MergeConfig, MergeRule

# two rules, so that the clock matters as well, and one that keeps, so that the loop does; one is tomesd's
CONFIG = MergeConfig(
    rules=(
        MergeRule(ratio=0.75, min_timestep=400, merge_crossattn=True, merge_mlp=True),
        MergeRule(side="kv", keep=500.0, max_downsample=8),
    )
)


def left_behind(pipe: Any) -> list:
    """All that a patch could leave: on the modules, on the scheduler, which is none, and on the pipeline."""
    return [*traces(pipe.unet), sorted(vars(pipe.scheduler).keys() - {"num_inference_steps"}), sorted(vars(pipe))]


@pytest.fixture(scope="module")
def expected() -> SimpleNamespace:
    pipe = Pipeline()
    plain, before = picture(pipe), left_behind(pipe)
    with tome_core.patch(pipe, CONFIG) as handle:
        merged, kinds = picture(pipe), set(places(handle))
    assert not torch.equal(plain, merged) and kinds == set(KINDS), "these are all that a patch consists of"
    return SimpleNamespace(pipe=pipe, plain=plain, merged=merged, before=before)


@pytest.mark.parametrize("error", MOST_ERRORS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_leaves_nothing_patched(expected, kind: str, error: type[BaseException]):
    pipe = expected.pipe
    with tome_core.patch(pipe, CONFIG) as handle:
        count = len(places(handle)[kind])
    for number in range(count) if THOROUGH else [count - 1]:
        for after in (False, True):
            with pytest.raises(error, match="by the test"), tome_core.patch(pipe, CONFIG) as handle:
                fault = Fault(places(handle)[kind][number], error, after, at=0 if kind == "SamplingScope" else 1)
                picture(pipe)
            assert fault.gone() and is_idle(handle) and left_behind(pipe) == expected.before
            assert not handle.time._mine.begun
            assert torch.equal(picture(pipe), expected.plain)
            # the same handle, and a new one, merge as on a model that has seen nothing
            with handle:
                assert torch.equal(picture(pipe), expected.merged)
            with tome_core.patch(pipe, CONFIG):
                assert torch.equal(picture(pipe), expected.merged)
    assert left_behind(pipe) == expected.before


@pytest.mark.parametrize("error", MOST_ERRORS)
def test_a_fault_in_an_inner_with_brings_the_outer_patch_back_which_comes_off_by_remove_patch(
    expected, error: type[BaseException]
):
    pipe = expected.pipe
    handle = tome_core.patch(pipe, CONFIG)
    with pytest.raises(error), tome_core.patch(pipe, MergeConfig(ratio=0.25)) as inner:
        fault = Fault(places(inner)["AttentionSite"][-1], error, after=False)
        picture(pipe)
    assert fault.gone() and torch.equal(picture(pipe), expected.merged)
    fault = Fault(places(handle)["BlockSite"][0], error, after=True)
    with pytest.raises(error):
        picture(pipe)
    assert fault.gone() and torch.equal(picture(pipe), expected.merged)
    tome_core.remove_patch(pipe)
    assert left_behind(pipe) == expected.before and torch.equal(picture(pipe), expected.plain)
