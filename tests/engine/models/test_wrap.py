"""Under, over and between other people's replacements of `forward`: whoever leaves first, nobody loses anything."""

from __future__ import annotations

from types import MethodType

import pytest
import torch

import tome_core
from tests.families import MODELS, Family, some_models
from tests.foreign_wrappers import sites_of, unwrap, wrap_everything
from tests.traces import traces
from tome_core import MergeConfig
from tome_core.models import find_models

# one of each way to be called: checkpointed `_forward`, plain LDM names, diffusers, and transformers
models = some_models("sd15", "ldm_sd1", "sgm_double", "comfy_double", "SD3.5", "Flux")
BY_HAND = ("ldm_sd1",)  # its attention calls no function, so nothing of it can be told beneath another's wrapper


@models
def test_a_wrap_that_comes_and_goes_at_every_picture_builds_no_chain(one: Family):
    model = one.build()
    vanilla = one.call(model)
    tome_core.apply_patch(model)
    merged = one.call(model)
    tome_core.remove_patch(model)
    for _ in range(20):
        tome_core.apply_patch(model)
        foreign = wrap_everything(model)
        tome_core.remove_patch(model)
        unwrap(foreign)
    assert torch.equal(one.call(model), vanilla)
    tome_core.apply_patch(model)
    assert torch.equal(one.call(model), merged)
    depth, forward = 0, vars(find_models(model)[0])["forward"]
    while forward is not None:
        depth, forward = depth + 1, getattr(getattr(forward, "__self__", forward), "beneath", None)
    assert 1 <= depth <= 2


@models
def test_an_old_wrap_put_back_over_a_new_patch_is_harmless(one: Family):
    """ControlNet saves a block's method once and puts that back at some later picture, whatever was patched since."""
    model = one.build()
    vanilla = one.call(model)
    sites = sites_of(model)
    first = tome_core.patch(model, MergeConfig(ratio=0.25))
    saved = [(module, name, getattr(module, name)) for module, name in sites]
    first.remove()
    second = tome_core.patch(model, MergeConfig(ratio=0.5))
    merged = one.call(model)
    for module, name, method in saved:
        setattr(module, name, method)
    assert torch.equal(one.call(model), merged)  # a model's wraps are the same ones for every patch
    second.install()
    assert torch.equal(one.call(model), merged)
    second.remove()
    assert torch.equal(one.call(model), vanilla)


@models
def test_a_patch_taken_back_over_somebody_elses_wrapper_merges_again(one: Family):
    model = one.build()
    vanilla, before = one.call(model), traces(model)
    outer = tome_core.patch(model, MergeConfig(ratio=0.5))
    merged = one.call(model)
    with tome_core.patch(model, MergeConfig(ratio=0.25)):
        foreign = wrap_everything(model)
    assert all(each.calls == 0 for each in foreign)
    outer.reset_counts()
    found, reasons = one.call(model), outer.report().reasons
    if one.name in BY_HAND:
        assert torch.equal(found, vanilla)
        assert all("calls no attention function that is known" in why for why in reasons) and reasons
    else:
        assert torch.equal(found, merged) and not torch.equal(found, vanilla) and not reasons
    assert all(each.calls == 1 for each in foreign)
    outer.remove()
    assert torch.equal(one.call(model), vanilla)
    for each in foreign:
        delattr(each.module, each.name)
    assert traces(model) == before


def _of_unet(block, x, *args, **kwargs):
    return x


def _of_flux(block, hidden_states, encoder_hidden_states, temb, image_rotary_emb=None, **kwargs):
    return encoder_hidden_states, hidden_states + block.attn.to_q(hidden_states)


@pytest.mark.parametrize("name, replaced, forward", [
    ("sd15", "block", _of_unet), ("sd15", "attn1", _of_unet), ("Flux", "block", _of_flux)])  # fmt: skip
def test_code_of_somebody_elses_in_place_of_all_that_we_merge_runs_and_the_report_says_so(name, replaced, forward):
    """A cache library replaces the whole forward of blocks."""
    one = MODELS[name]
    model = one.build()
    with tome_core.patch(model, MergeConfig(ratio=0.5)) as handle:
        for block in [module for module in model.modules() if type(module).__name__.endswith("TransformerBlock")]:
            target = block.attn1 if replaced == "attn1" else block
            target.forward = MethodType(forward, target)
        one.call(model)
        report = handle.report()
    assert report.calls == 1 and not report.merged_anything
    assert any("something else runs in its place" in why for why in report.reasons), str(report)
