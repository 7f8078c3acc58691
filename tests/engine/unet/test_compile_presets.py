"""Presets in compiled UNets: one graph for each phase, which keeps matches as a UNet does that is not compiled."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend

import tome_core
from tests.compiling import BY_NAME, SMALL, compiled
from tests.families import largest_difference
from tests.models import call_case
from tome_core import PRESETS, MergeConfig, preset
from tome_core.settings.phases import plain_rules

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def config_of(name: str) -> MergeConfig:
    """The preset on grids of any size."""
    return replace(preset(name), only_if_it_pays=False)


def pictures(case, model, handle, times):
    for time in times:
        handle.set_time(timestep=time, sampling="one")
        yield call_case(case, model, timestep=torch.tensor(time))


@pytest.mark.slow
@pytest.mark.parametrize("name", PRESETS)
def test_a_phase_is_one_graph(name):
    config, backend = config_of(name), CompileCounter()
    times = (950, 900, 700, 200, 150, 50)
    plain, model = SMALL.build(), SMALL.build()
    with tome_core.patch(plain, config) as eager, tome_core.patch(model, config) as handle:
        whole = compiled(model, backend)
        for found, expected in zip(
            pictures(SMALL, whole, handle, times), pictures(SMALL, plain, eager, times), strict=True
        ):
            assert torch.equal(found, expected)
    assert backend.frame_count == len(plain_rules(config, [1]))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sdxl", "one_level_ldm"])
def test_other_families_compile_the_balanced_preset_whole(name):
    case, config, backend = BY_NAME[name], config_of("balanced"), CompileCounter()
    plain, model = case.build(), case.build()
    with tome_core.patch(plain, config) as eager, tome_core.patch(model, config) as handle:
        whole = compiled(model, backend)
        for found, expected in zip(
            pictures(case, whole, handle, (100, 60)), pictures(case, plain, eager, (100, 60)), strict=True
        ):
            assert torch.equal(found, expected)
    assert backend.frame_count == 1


@pytest.mark.slow
def test_inductor_builds_a_block_of_the_balanced_preset():
    config, backend = config_of("balanced"), CompileCounterWithBackend("inductor")
    plain, model = SMALL.build(), SMALL.build()
    with tome_core.patch(plain, config) as eager, tome_core.patch(model, config) as handle:
        whole = compiled(model, backend)
        for found, expected in zip(
            pictures(SMALL, whole, handle, (100, 60, 0)), pictures(SMALL, plain, eager, (100, 60, 0)), strict=True
        ):
            assert largest_difference(found, expected) < 1e-4
    assert backend.frame_count == 1
