"""The balanced preset, compiled, keeps matches as one that is not compiled: other families, and inductor."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend

import tome_core
from tests.compiling import SMALL, compiled
from tests.families import largest_difference
from tests.models import BY_NAME, call_case, on_small

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def pictures(case, model, handle, times):
    for time in times:
        handle.set_time(timestep=time, sampling="one")
        yield call_case(case, model, timestep=torch.tensor(time))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sdxl", "one_level_ldm"])
def test_other_families_compile_the_balanced_preset_whole(name):
    case, config, backend = BY_NAME[name], on_small("balanced"), CompileCounter()
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
    config, backend = on_small("balanced"), CompileCounterWithBackend("inductor")
    plain, model = SMALL.build(), SMALL.build()
    with tome_core.patch(plain, config) as eager, tome_core.patch(model, config) as handle:
        whole = compiled(model, backend)
        for found, expected in zip(
            pictures(SMALL, whole, handle, (100, 60, 0)), pictures(SMALL, plain, eager, (100, 60, 0)), strict=True
        ):
            assert largest_difference(found, expected) < 1e-4
    assert backend.frame_count == 1
