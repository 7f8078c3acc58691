"""A call is what it was when it began, and leaves nothing behind, however it ends.

Little is left to luck: a hook in the middle of a call lets another thread act, and waits for it. Errors, interrupts
and a full memory are raised at every kind of wrap, which the handle is asked for: a new kind is in here without a word.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import tome_core
from tests.families import MODELS
from tests.least_pipeline import Pipeline, picture
from tests.models import Family, on_small
from tests.thoroughness import THOROUGH, some_quick
from tests.threads import at_once
from tests.traces import is_idle, traces, wraps_of
from tome_core import MergeConfig, MergeRule
from tome_core.models.sites import AttentionSite
from tome_core.patching import SamplingScope

BALANCED, LESS = on_small("balanced"), MergeConfig(ratio=0.3, max_downsample=8)
TOMESD = MergeConfig(ratio=0.5, merge_mlp=True, proportional=False)
# a place in the first block, after its first attention, and in an attention, of either kind of model
PLACES = {
    "sd15": ("down_blocks.0.attentions.0.transformer_blocks.0.attn2",
             "mid_block.attentions.0.transformer_blocks.0.attn1.to_k"),
    "Flux": ("single_transformer_blocks.0", "single_transformer_blocks.1.attn.to_k"),
}  # fmt: skip

at_every_place = pytest.mark.parametrize(
    ("one", "place"), [(MODELS[name], place) for name, places in PLACES.items() for place in places],
    ids=lambda it: getattr(it, "name", it),
)  # fmt: skip


def merged(one: Family, config: MergeConfig | None, **call: Any) -> torch.Tensor:
    """The picture of a fresh model with a patch that has seen no other; None: without a patch."""
    model = one.build()
    if config is not None:
        tome_core.patch(model, config)
    return one.call(model, **call)


def once_in(model: nn.Module, place: str, work: Callable[[], Any]) -> None:
    """At the next call of the module at this place, before it, do some work."""

    def hook(*_: Any) -> None:
        handle.remove()
        work()

    handle = model.get_submodule(place).register_forward_pre_hook(hook)


def meanwhile(model: nn.Module, place: str, work: Callable[[], Any]) -> None:
    """The same in another thread, which is waited for."""
    once_in(model, place, lambda: at_once(work))


@at_every_place
def test_a_call_during_which_another_patch_comes_or_this_one_goes_and_the_next_one(one: Family, place: str):
    """Nothing waits for the call. Of other parts, or taken off, what it had not reached yet merges no more."""
    model = one.build()
    for before, after, stays in (
        (None, BALANCED, True), (None, TOMESD, True), (BALANCED, LESS, True),
        (BALANCED, None, False), (TOMESD, None, False), (TOMESD, BALANCED, False), (BALANCED, TOMESD, False),
    ):  # fmt: skip
        tome_core.remove_patch(model)
        handle = None if before is None else tome_core.patch(model, before)
        meanwhile(model, place, handle.uninstall if after is None else partial(tome_core.patch, model, after))
        found = one.call(model)
        assert torch.equal(found, merged(one, before)) if stays else found.isfinite().all()
        assert handle is None or (is_idle(handle) and handle.report().calls == 1)
        assert torch.equal(one.call(model), merged(one, after))


@at_every_place
def test_a_model_called_again_inside_of_its_own_call_gives_both_pictures(one: Family, place: str):
    """As hooks do that look at the same picture once more: reference-only, perturbed guidance."""
    model = one.build()
    for config in (BALANCED, TOMESD):
        for inner in ({}, {"timestep": 900}):
            pictures: list[torch.Tensor] = []
            with tome_core.patch(model, config):
                once_in(model, place, lambda: pictures.append(one.call(model, **inner)))  # noqa: B023
                pictures.append(one.call(model))
            assert torch.equal(pictures[0], merged(one, config, **inner))
            assert torch.equal(pictures[1], merged(one, config))


@at_every_place
def test_a_call_keeps_its_rules_when_another_thread_tells_the_time(one: Family, place: str):
    model, config = one.build(), MergeConfig(ratio=0.75, min_timestep=500.0)
    with tome_core.patch(model, config) as handle:
        meanwhile(model, place, partial(handle.set_time, timestep=900))
        assert torch.equal(one.call(model, timestep=100), merged(one, None, timestep=100))
        assert handle.report().levels[0].reasons and not handle.report().merged_anything


# --- threads ----------------------------------------------------------------------------------------------------------

ROUNDS = 30 if THOROUGH else 5
CONFIGS = (
    MergeConfig(ratio=0.75, merge_mlp=True, end_percent=0.6),
    MergeConfig(rules=(MergeRule(side="kv", sx=4, sy=4, ratio=0.9, refine=1, seed=5),)),
)


@pytest.mark.parametrize("config", CONFIGS)
def test_what_another_thread_compiles_changes_no_picture_and_no_count(config, monkeypatch):
    found = []
    for compiles in (False, True):  # of which torch tells every thread
        monkeypatch.setattr(torch.compiler, "_is_compiling_flag", compiles)
        with tome_core.patch(pipe := Pipeline(), config) as handle:
            found.append((picture(pipe), handle.report().as_data()))
        assert torch.compiler.is_compiling() == compiles
    (alone, counted), (beside, count) = found
    assert torch.equal(alone, beside) and counted == count and counted["work_saved"]


def test_two_models_in_two_threads_give_their_own_pictures():
    def pictures(config: MergeConfig) -> list[torch.Tensor]:
        with tome_core.patch(pipe := Pipeline(), config):
            return [picture(pipe) for _ in range(ROUNDS)]

    works = [partial(pictures, config) for config in CONFIGS]
    alone = [work()[0] for work in works]
    for expected, found in zip(alone, at_once(*works, interval=1e-5), strict=True):
        assert all(torch.equal(one, expected) for one in found)


# --- errors -----------------------------------------------------------------------------------------------------------

# two rules, so that the clock matters as well, and one that keeps, so that the loop does; one is tomesd's
CONFIG = MergeConfig(
    rules=(
        MergeRule(ratio=0.75, min_timestep=400, merge_crossattn=True, merge_mlp=True),
        MergeRule(side="kv", keep=500.0, max_downsample=8),
    )
)
KINDS = (
    "ModelSite", "TransformerSite", "BlockSite", "BlockAttentionSite", "AttentionSite", "PartSite", "SamplingScope",
)  # fmt: skip
ERRORS = some_quick((RuntimeError, KeyboardInterrupt, torch.cuda.OutOfMemoryError), 2)  # the last is a RuntimeError too


def places(handle: Any, kind: str) -> list[Any]:
    """Every wrap of a patch that is of the class of this name."""
    return [wrap for wrap in wraps_of(handle) if type(wrap).__name__ == kind]


class Fault:
    """Stands where a wrap calls on, and raises in one of its calls: before what lies beneath has run, or after it.

    It is a class of its own, because the patch asks for its targets' class at every call; a self-attention of another
    class would have another code, so there it is its first layer, or its last.
    """

    def __init__(self, wrap: Any, error: type[BaseException], after: bool) -> None:
        self.error, self.after = error, after
        self.left = 1 if isinstance(wrap, SamplingScope) else 2  # calls until it raises
        self.target, self.name = wrap.target, wrap.name
        if isinstance(wrap, AttentionSite):
            self.target = wrap.target.to_out[-1] if after else wrap.target.to_q
        self.own = type(self.target)
        calls = {self.name: lambda target, *args, **kwargs: self._call(target, *args, **kwargs)}
        self.target.__class__ = type(self.own.__name__, (self.own,), calls)

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        self.left -= 1
        out = getattr(self.own, self.name)(*args, **kwargs) if self.left or self.after else None
        if self.left == 0:
            self.target.__class__ = self.own
            raise self.error("by the test")
        return out


def left_behind(pipe: Any) -> list:
    """All that a patch could leave: on the modules, on the scheduler, which is none, and on the pipeline."""
    return [*traces(pipe.unet), sorted(vars(pipe.scheduler).keys() - {"num_inference_steps"}), sorted(vars(pipe))]


@pytest.fixture(scope="module")
def expected() -> SimpleNamespace:
    pipe = Pipeline()
    plain, before = picture(pipe), left_behind(pipe)
    with tome_core.patch(pipe, CONFIG) as handle:
        merged, kinds = picture(pipe), {type(wrap).__name__ for wrap in wraps_of(handle)}
    assert not torch.equal(plain, merged) and kinds == set(KINDS), "these are all that a patch consists of"
    return SimpleNamespace(pipe=pipe, plain=plain, merged=merged, before=before)


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_leaves_nothing_patched(expected, kind: str, error: type[BaseException]):
    pipe = expected.pipe
    with tome_core.patch(pipe, CONFIG) as handle:
        count = len(places(handle, kind))
    for number in range(count) if THOROUGH else [count - 1]:
        for after in (False, True):
            with pytest.raises(error, match="by the test"), tome_core.patch(pipe, CONFIG) as handle:
                Fault(places(handle, kind)[number], error, after)
                picture(pipe)
            assert is_idle(handle) and left_behind(pipe) == expected.before
            assert not handle.time._mine.begun and torch.equal(picture(pipe), expected.plain)
            with handle:
                assert torch.equal(picture(pipe), expected.merged), "as on a model that has seen nothing"
    assert left_behind(pipe) == expected.before
