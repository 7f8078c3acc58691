"""Two models in two threads at once: each gives the picture that it gives alone."""

from __future__ import annotations

import sys
import threading
from functools import partial
from typing import Any

import pytest
import torch

import tome_core
from tests.least_pipeline import Pipeline, picture
from tests.models import BY_NAME, call_case
from tests.thoroughness import THOROUGH
from tests.threads import at_once
from tests.traces import traces
from tome_core import MergeConfig, MergeRule

CASE = BY_NAME["ldm_sd1"]
ROUNDS = 30 if THOROUGH else 5
CONFIGS = (
    MergeConfig(ratio=0.75, merge_mlp=True, end_percent=0.6),
    MergeConfig(rules=(MergeRule(side="kv", sx=4, sy=4, ratio=0.9, refine=1, seed=5),)),
)


@pytest.fixture(autouse=True)
def threads_change_often():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.parametrize("config", CONFIGS)
def test_what_another_thread_compiles_changes_no_picture_and_no_count(config, monkeypatch):
    found = []
    for compiles in (False, True):  # of which torch tells every thread
        monkeypatch.setattr(torch.compiler, "_is_compiling_flag", compiles)
        with tome_core.patch(pipe := Pipeline(), config) as handle:
            found.append((picture(pipe), handle.report().as_data()))
        assert torch.compiler.is_compiling() == compiles
    (alone, counted), (beside, told) = found
    assert torch.equal(alone, beside) and counted == told and counted["work_saved"]


def rounds(pipe: Any, config: MergeConfig) -> list[torch.Tensor]:
    """Merged and plain pictures in turn."""
    pictures = []
    for _ in range(ROUNDS):
        with tome_core.patch(pipe, config):
            pictures.append(picture(pipe))
        pictures.append(picture(pipe))
    return pictures


@pytest.mark.parametrize("configs", [CONFIGS, CONFIGS[:1] * 2], ids=["two configs", "one config for both"])
def test_two_models_in_two_threads_give_their_own_pictures(configs):
    pipes = [Pipeline() for _ in configs]
    before = [traces(pipe.unet) for pipe in pipes]
    works = [partial(rounds, pipe, config) for pipe, config in zip(pipes, configs, strict=True)]
    alone = [work()[:2] for work in works]
    assert torch.equal(alone[0][0], alone[1][0]) == (configs[0] is configs[1])
    for (merged, plain), pictures in zip(alone, at_once(*works), strict=True):
        assert all(torch.equal(one, merged) for one in pictures[::2])
        assert all(torch.equal(one, plain) for one in pictures[1::2])
    assert [traces(pipe.unet) for pipe in pipes] == before


def test_a_call_keeps_its_rules_when_another_thread_tells_the_time():
    model = CASE.build()
    with tome_core.patch(model, MergeConfig(ratio=0.75, min_timestep=500.0)) as handle:
        look, others = handle.time._look_at, []

        def interrupted(timestep: Any) -> Any:
            now = look(timestep)
            others.append(threading.Thread(target=lambda: handle.set_time(timestep=900)))
            others[0].start()
            others[0].join(0.2)  # time enough to do harm
            return now

        handle.time._look_at = interrupted
        call_case(CASE, model, timestep=100)
        others[0].join()
    assert handle.report().levels[0].reasons and not handle.report().levels[0].calls_merged
