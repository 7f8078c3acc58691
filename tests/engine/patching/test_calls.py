"""A call is what it was when it began: who patches meanwhile, or calls the model again, changes later ones.

Two models in two threads at once give the pictures that each gives alone. Little is left to luck: a hook in the middle
of a call lets the others act, and waits for them.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import tome_core
from tests.families import MODELS, Family
from tests.least_pipeline import Pipeline, picture
from tests.models import BY_NAME, call_case, on_small
from tests.thoroughness import THOROUGH
from tests.threads import at_once
from tests.traces import is_idle, traces
from tome_core import MergeConfig, MergeRule

BALANCED, LESS = on_small("balanced"), MergeConfig(ratio=0.3, max_downsample=8)
TOMESD = MergeConfig(ratio=0.5, merge_mlp=True, proportional=False)
LONG = 60  # nothing takes so long; the thread that acts ends long before
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


def merged(one: Family, config: MergeConfig, **call: Any) -> torch.Tensor:
    """The picture of a fresh model with a patch that has seen no other."""
    model = one.build()
    with tome_core.patch(model, config):
        return one.call(model, **call)


def once_in(model: nn.Module, place: str, work: Callable[[], Any]) -> None:
    """At the next call of the module at this place, before it, do some work."""

    def hook(*_: Any) -> None:
        handle.remove()
        work()

    handle = model.get_submodule(place).register_forward_pre_hook(hook)


def meanwhile(model: nn.Module, place: str, work: Callable[[], Any]) -> None:
    """The same in another thread, which is waited for."""

    def run() -> None:
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        thread.join(LONG)
        assert not thread.is_alive(), "it waits for the call"

    once_in(model, place, run)


@at_every_place
def test_a_call_that_began_without_a_patch_ends_without_it(one: Family, place: str):
    model = one.build()
    plain = one.call(model)
    for config in (BALANCED, TOMESD):
        handles: list[Any] = []
        meanwhile(model, place, lambda: handles.append(tome_core.patch(model, config)))  # noqa: B023
        assert torch.equal(one.call(model), plain)
        assert torch.equal(one.call(model), merged(one, config)) and handles[0].report().calls == 1
        handles[0].remove()
        assert torch.equal(one.call(model), plain)


@at_every_place
def test_a_call_keeps_its_settings_while_another_patch_of_the_same_parts_is_put_on(one: Family, place: str):
    model = one.build()
    first = tome_core.patch(model, BALANCED)
    meanwhile(model, place, lambda: tome_core.patch(model, LESS))
    assert torch.equal(one.call(model), merged(one, BALANCED))
    assert torch.equal(one.call(model), merged(one, LESS)) and first.report().calls == 1


@at_every_place
def test_a_call_whose_patch_goes_ends_and_the_next_one_is_of_what_is_on(one: Family, place: str):
    """Nothing waits for it; what it had not reached yet merges no more."""
    model = one.build()
    plain = one.call(model)
    for before, after in ((BALANCED, None), (TOMESD, None), (TOMESD, BALANCED), (BALANCED, TOMESD)):
        handle = tome_core.patch(model, before)
        work = handle.uninstall if after is None else partial(tome_core.patch, model, after)
        meanwhile(model, place, work)
        assert one.call(model).isfinite().all() and is_idle(handle)
        assert torch.equal(one.call(model), plain if after is None else merged(one, after))


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


# --- threads ----------------------------------------------------------------------------------------------------------

ROUNDS = 30 if THOROUGH else 5
CONFIGS = (
    MergeConfig(ratio=0.75, merge_mlp=True, end_percent=0.6),
    MergeConfig(rules=(MergeRule(side="kv", sx=4, sy=4, ratio=0.9, refine=1, seed=5),)),
)


@pytest.fixture
def threads_change_often():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def test_what_another_thread_compiles_changes_no_picture_and_no_count(monkeypatch):
    for config in CONFIGS:
        found = []
        for compiles in (False, True):  # of which torch tells every thread
            monkeypatch.setattr(torch.compiler, "_is_compiling_flag", compiles)
            with tome_core.patch(pipe := Pipeline(), config) as handle:
                found.append((picture(pipe), handle.report().as_data()))
            assert torch.compiler.is_compiling() == compiles
        (alone, counted), (beside, count) = found
        assert torch.equal(alone, beside) and counted == count and counted["work_saved"]


def rounds(pipe: Any, config: MergeConfig) -> list[torch.Tensor]:
    """Merged and plain pictures in turn."""
    pictures = []
    for _ in range(ROUNDS):
        with tome_core.patch(pipe, config):
            pictures.append(picture(pipe))
        pictures.append(picture(pipe))
    return pictures


@pytest.mark.parametrize("configs", [CONFIGS, CONFIGS[:1] * 2], ids=["two configs", "one config for both"])
def test_two_models_in_two_threads_give_their_own_pictures(configs, threads_change_often):
    pipes = [Pipeline() for _ in configs]
    before = [traces(pipe.unet) for pipe in pipes]
    works = [partial(rounds, pipe, config) for pipe, config in zip(pipes, configs, strict=True)]
    alone = [work()[:2] for work in works]
    assert torch.equal(alone[0][0], alone[1][0]) == (configs[0] is configs[1])
    for (expected, plain), pictures in zip(alone, at_once(*works), strict=True):
        assert all(torch.equal(found, expected) for found in pictures[::2])
        assert all(torch.equal(found, plain) for found in pictures[1::2])
    assert [traces(pipe.unet) for pipe in pipes] == before


def test_a_call_keeps_its_rules_when_another_thread_tells_the_time():
    case = BY_NAME["ldm_sd1"]
    model = case.build()
    with tome_core.patch(model, MergeConfig(ratio=0.75, min_timestep=500.0)) as handle:
        look, others = handle.time._look_at, []

        def interrupted(timestep: Any) -> Any:
            now = look(timestep)
            others.append(threading.Thread(target=lambda: handle.set_time(timestep=900)))
            others[0].start()
            others[0].join(0.2)  # time enough to do harm
            return now

        handle.time._look_at = interrupted
        call_case(case, model, timestep=100)
        others[0].join()
    assert handle.report().levels[0].reasons and not handle.report().levels[0].calls_merged
