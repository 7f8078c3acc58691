"""accelerate's hooks, which replace `forward` as we do, put on before and after the patch. On the CPU alone.

The pipelines' `enable_model_cpu_offload` and `enable_sequential_cpu_offload` are these calls with a GPU's name.
"""

from __future__ import annotations

import pytest
import torch
from accelerate import cpu_offload
from accelerate.hooks import remove_hook_from_module

import tome_core
from tests.models import BY_NAME, call_case
from tests.offloading import CPU, WAYS, offload_as_a_model
from tests.thoroughness import some_quick
from tests.traces import traces
from tome_core import MergeConfig
from tome_core.models.unet_blocks import find_unet
from tome_core.models.wrap import Wrap

FEW = [BY_NAME[name] for name in ("sd15", "ldm_wrapped", "sdxl", "sgm_double")]


@pytest.mark.parametrize("case", some_quick(FEW, 2), ids=lambda case: case.name)
@pytest.mark.parametrize("offload", WAYS, ids=lambda way: way.__name__.strip("_"))
@pytest.mark.parametrize("patch_first", [True, False])
@pytest.mark.parametrize("unpatch_first", some_quick([True, False]))
def test_offloading_and_merging_come_and_go_in_any_order(case, offload, patch_first: bool, unpatch_first: bool):
    model = case.build()
    vanilla = call_case(case, model)
    merged = call_case(case, tome_core.apply_patch(case.build(), merge_mlp=True))
    for is_patch in (patch_first, not patch_first):
        tome_core.apply_patch(model, merge_mlp=True) if is_patch else offload(find_unet(model))
    for _ in range(2):
        assert torch.equal(call_case(case, model), merged)
    assert tome_core.report(model).merged_anything
    for is_patch in (unpatch_first, not unpatch_first):
        tome_core.remove_patch(model) if is_patch else remove_hook_from_module(find_unet(model), recurse=True)
        assert torch.equal(call_case(case, model), vanilla if is_patch or unpatch_first else merged)


@pytest.mark.parametrize("patch_first", [True, False])
def test_a_hook_that_is_renewed_after_every_picture_does_not_cost_the_patch(patch_first: bool):
    """diffusers' model offload removes and renews its hooks then; the time of a call must not get lost."""
    case = BY_NAME["sd15"]
    config = MergeConfig(min_timestep=600)
    plain, model = case.build(), case.build()
    tome_core.patch(plain, config)
    if patch_first:
        tome_core.patch(model, config)
    offload_as_a_model(model)
    if not patch_first:
        tome_core.patch(model, config)
    for _ in range(3):
        for time in (900, 500):
            assert torch.equal(call_case(case, model, timestep=time), call_case(case, plain, timestep=time))
        remove_hook_from_module(model, recurse=True)
        offload_as_a_model(model)
    assert tome_core.report(model).calls == 6
    tome_core.remove_patch(model)
    remove_hook_from_module(model, recurse=True)
    assert torch.equal(call_case(case, model), call_case(case, case.build()))


@pytest.mark.parametrize("patch_first", [True, False])
def test_a_patch_leaves_a_hooked_model_as_it_found_it(patch_first: bool):
    case = BY_NAME["sd15"]
    model, hooked = case.build(), case.build()
    cpu_offload(find_unet(hooked), CPU)
    if patch_first:
        tome_core.apply_patch(model)
    cpu_offload(find_unet(model), CPU)
    tome_core.apply_patch(model)
    call_case(case, model)
    tome_core.remove_patch(model)
    assert traces(model) == traces(hooked)
    methods = [vars(module).get("_old_forward") for module in model.modules()]
    assert not [one for one in methods if isinstance(getattr(one, "__self__", one), Wrap)]
