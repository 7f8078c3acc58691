"""Under, over and between other people's replacements of `forward`: whoever leaves first, nobody loses anything."""

from __future__ import annotations

import pytest
import torch

import tome_core
from tests.foreign_wrappers import sites_of, unwrap, wrap_everything
from tests.models import CASES, ModelCase, call_case
from tests.traces import traces
from tome_core import MergeConfig
from tome_core.models.unet_blocks import find_unet

# one of each way to be called: checkpointed `_forward`, plain LDM names, diffusers
FEW = [case for case in CASES if case.name in ("ldm_sd1", "sgm_double", "comfy_double", "sd15")]
families = pytest.mark.parametrize("case", FEW, ids=lambda case: case.name)


@families
@pytest.mark.parametrize("ours_is_on_top", [True, False])
@pytest.mark.parametrize("ours_leaves_first", [True, False])
def test_ours_and_theirs_leave_in_either_order(case: ModelCase, ours_is_on_top: bool, ours_leaves_first: bool):
    model = case.build()
    vanilla = call_case(case, model)
    if ours_is_on_top:
        foreign = wrap_everything(model)
        tome_core.apply_patch(model)
    else:
        tome_core.apply_patch(model)
        foreign = wrap_everything(model)
    merged = call_case(case, model)
    assert not torch.equal(merged, vanilla) and all(one.calls == 1 for one in foreign)
    if ours_leaves_first:
        tome_core.remove_patch(model)
        assert torch.equal(call_case(case, model), vanilla) and all(one.calls == 2 for one in foreign)
        unwrap(foreign)
    else:
        unwrap(foreign)
        call_case(case, model)
        tome_core.remove_patch(model)
    assert torch.equal(call_case(case, model), vanilla)
    assert not tome_core.report(model).patched
    tome_core.apply_patch(model)
    assert torch.equal(call_case(case, model), merged)
    tome_core.remove_patch(model)
    assert torch.equal(call_case(case, model), vanilla)


@families
def test_a_wrap_that_comes_and_goes_at_every_picture_builds_no_chain(case: ModelCase):
    model = case.build()
    vanilla = call_case(case, model)
    tome_core.apply_patch(model)
    merged = call_case(case, model)
    tome_core.remove_patch(model)
    for _ in range(20):
        tome_core.apply_patch(model)
        foreign = wrap_everything(model)
        tome_core.remove_patch(model)
        unwrap(foreign)
    assert torch.equal(call_case(case, model), vanilla)
    tome_core.apply_patch(model)
    assert torch.equal(call_case(case, model), merged)
    depth, forward = 0, vars(find_unet(model))["forward"]
    while forward is not None:
        depth, forward = depth + 1, getattr(forward, "beneath", None)
    assert depth <= 2


@families
def test_an_old_wrap_put_back_over_a_new_patch_is_harmless(case: ModelCase):
    """ControlNet saves a block's method once and puts that back at some later picture, whatever was patched since."""
    model = case.build()
    vanilla = call_case(case, model)
    sites = sites_of(model)
    first = tome_core.patch(model, MergeConfig(ratio=0.25))
    saved = [(module, name, getattr(module, name)) for module, name in sites]
    first.remove()
    second = tome_core.patch(model, MergeConfig(ratio=0.5))
    merged = call_case(case, model)
    for module, name, method in saved:
        setattr(module, name, method)
    assert torch.equal(call_case(case, model), merged)  # a UNet's wraps are the same ones for every patch
    second.install()
    assert torch.equal(call_case(case, model), merged)
    second.remove()
    assert torch.equal(call_case(case, model), vanilla)


@families
def test_a_patch_taken_back_over_somebody_elses_wrapper_merges_again(case: ModelCase):
    """What it does to an attention nobody knows, so that gets merged tokens, as on a model that came wrapped."""
    model, other = case.build(), case.build()
    vanilla = call_case(case, model)
    wrap_everything(other)
    before = traces(model)
    with tome_core.patch(other, MergeConfig(ratio=0.5)):
        expected = call_case(case, other)
    outer = tome_core.patch(model, MergeConfig(ratio=0.5))
    assert not torch.equal(call_case(case, model), vanilla)
    with tome_core.patch(model, MergeConfig(ratio=0.25)):
        foreign = wrap_everything(model)
    assert all(one.calls == 0 for one in foreign)
    outer.reset_counts()
    assert torch.equal(call_case(case, model), expected) and not torch.equal(expected, vanilla)
    assert all("is not known" in route for level in outer.report().levels for route in level.routes)
    assert all(one.calls == 1 for one in foreign)
    outer.remove()
    assert torch.equal(call_case(case, model), vanilla)
    for one in foreign:
        delattr(one.module, one.name)
    assert traces(model) == before
