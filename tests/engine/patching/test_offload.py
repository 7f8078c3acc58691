"""Offloading, which replaces `forward` as we do, put on before and after the patch. On the CPU alone.

The pipelines' `enable_model_cpu_offload` and `enable_sequential_cpu_offload` are these calls with a GPU's name.
"""

from __future__ import annotations

import pytest
import torch
from accelerate import cpu_offload
from accelerate.hooks import remove_hook_from_module

import tome_core
from tests.families import Family, some_models
from tests.offloading import CPU, as_a_model
from tests.traces import traces
from tome_core import MergeConfig
from tome_core.models.wrap import wrap_of

CONFIG = MergeConfig(ratio=0.5, merge_mlp=True)
either = some_models("sd15", "Flux")


@either
@pytest.mark.parametrize("patch_first", [True, False])
def test_a_hook_that_is_renewed_after_every_picture_does_not_cost_the_patch(one: Family, patch_first: bool):
    """diffusers' model offload removes and renews its hooks then; the time of a call must not get lost."""
    config = MergeConfig(min_timestep=600)
    plain, model = one.build(), one.build()
    tome_core.patch(plain, config)
    if patch_first:
        tome_core.patch(model, config)
    as_a_model(model)
    if not patch_first:
        tome_core.patch(model, config)
    for _ in range(3):
        for time in (900, 500):
            assert torch.equal(one.call(model, timestep=time), one.call(plain, timestep=time))
        remove_hook_from_module(model, recurse=True)
        as_a_model(model)
    assert tome_core.report(model).calls == 6 and tome_core.report(model).merged_anything
    tome_core.remove_patch(model)
    remove_hook_from_module(model, recurse=True)
    assert torch.equal(one.call(model), one.call(one.build()))


@either
@pytest.mark.parametrize("patch_first", [True, False])
def test_a_patch_leaves_a_hooked_model_as_it_found_it(one: Family, patch_first: bool):
    model, hooked = one.build(), one.build()
    cpu_offload(hooked, CPU)
    if patch_first:
        tome_core.patch(model, CONFIG)
    cpu_offload(model, CPU)
    tome_core.patch(model, CONFIG)
    one.call(model)
    tome_core.remove_patch(model)
    assert traces(model) == traces(hooked)
    methods = [vars(module).get(slot) for module in model.modules() for slot in ("forward", "_old_forward")]
    assert not any(wrap_of(method) for method in methods if method is not None)
