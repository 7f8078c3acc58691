"""One contract for every model: the effects of patching, calling and unpatching."""

import inspect
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

import tome_core
from tests.small_models.families import any_model, every_model, every_unet, largest_difference, some_models
from tests.small_models.least_unet import KEPT
from tests.small_models.unets import Family, merge_with_self
from tests.watching.traces import attributes, is_idle, traces, wraps_of
from tome_core import MergeConfig
from tome_core.merging.methods import METHODS
from tome_core.models.unet_blocks import find_unet
from tome_core.settings.config import SIDES

EVERYTHING = {"ratio": 0.5, "merge_crossattn": True, "merge_mlp": True}
ALL_LEVELS = MergeConfig(max_downsample=8, **EVERYTHING)
# models that leave masked tokens out before a merge, which changes the sums
PADDED = ("Qwen-Image, padded", "HunyuanVideo", "HunyuanVideo 1.5", "HunyuanImage")
on_either_kind = some_models("sd15", "Flux")


@every_unet
def test_merging_changes_the_picture_and_says_so_and_a_sample_merges_alone_as_in_a_batch(family: Family):
    """Hosts run the passes of guidance together or apart: rounding alone may move a token."""
    model, groups = family.build(), []
    for batch in (2, 1, 3):
        vanilla = family.call(model, batch)
        with tome_core.patch(model, ratio=0.5, proportional=False) as handle:
            handle.keep_maps()
            merged = family.call(model, batch)
        assert merged.shape == vanilla.shape and merged.isfinite().all()
        assert largest_difference(merged, vanilla) > 1e-3
        level = handle.report().levels[0]
        assert handle.report().calls == 1 and level.calls_merged == level.blocks and not level.reasons
        assert {(2 * queries, 2 * keys) for _, queries, keys in level.tokens} == {2 * (level.tokens[0][0],)}
        groups.append(handle.maps()[0].group[:1])
        assert (groups[0] == groups[-1]).float().mean() > 0.98


@every_model
def test_merging_each_token_with_itself_changes_no_bit_and_nothing_is_said(family: Family, monkeypatch, caplog):
    """Every site merges and unmerges, and only the plan may change the output."""
    merge_with_self(monkeypatch)
    model = family.build()
    vanilla = family.call(model)
    for side in ("qkv", "kv"):
        for proportional in (False, True):  # sizes change the sums, and a UNet amplifies that
            most = 1e-3 if proportional else 1e-5 if family.name in PADDED else 0.0
            config = MergeConfig(max_downsample=8, side=side, proportional=proportional, **EVERYTHING)
            with tome_core.patch(model, config) as handle:
                assert largest_difference(family.call(model), vanilla) <= most
            assert all(level.calls_merged >= level.blocks for level in handle.report().levels)
    assert "not expected" not in caplog.text, "diffusers says so of arguments that an attention does not know"


@any_model
def test_every_method_part_and_side_runs_at_every_level(family: Family):
    model = family.build()
    vanilla = family.call(model)
    for method in METHODS:
        for side in SIDES:
            config = MergeConfig(method=method, side=side, max_downsample=8, merge_crossattn=True, merge_mlp=True)
            with tome_core.patch(model, config) as handle:
                merged = family.call(model)
            assert merged.isfinite().all() and largest_difference(merged, vanilla) > 1e-4
            assert all(level.calls_merged for level in handle.report().levels)


@every_unet
def test_a_call_by_keywords_is_the_same_call(family: Family):
    model = family.build()
    assert tome_core.apply_patch(model, max_downsample=8, **EVERYTHING) is model
    by_position = family.call(model)
    unet = find_unet(model)
    names = list(inspect.signature(type(unet).forward).parameters)[1:]

    def call(*args, **kwargs):
        return unet(**dict(zip(names, args, strict=False)), **kwargs)

    assert torch.equal(family.call(call), by_position)


@any_model
def test_the_global_rng_is_left_alone_and_equal_seeds_give_equal_bits(family: Family):
    model = family.build()
    tome_core.apply_patch(model, seed=3)
    state = torch.get_rng_state()
    first = family.call(model, timestep=321)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(17)
    family.call(model, timestep=5)
    assert torch.equal(family.call(model, timestep=321), first)
    tome_core.apply_patch(model, seed=4)
    assert not torch.equal(family.call(model, timestep=321), first)


@on_either_kind
def test_a_picture_does_not_depend_on_the_one_before_and_a_removed_patch_keeps_nothing_of_it(family: Family):
    model = family.build()

    def draw(handle, name, steps):
        pictures = []
        for timestep in steps:
            handle.set_time(timestep=timestep, sampling=name)
            pictures.append(family.call(model, timestep=timestep))
        return pictures

    with tome_core.patch(model, KEPT) as handle:
        draw(handle, "other", (900, 860, 550, 500))
        second = draw(handle, "this", (900, 600, 550))
        assert handle.time._sampling._plans
    assert not handle.time._sampling._plans
    with tome_core.patch(model, KEPT) as handle:
        assert all(map(torch.equal, second, draw(handle, "this", (900, 600, 550))))


@any_model
def test_where_nothing_is_to_merge_no_bit_changes(family: Family):
    model = family.build()
    vanilla = family.call(model)
    for settings in ({"ratio": 0.0, "merge_crossattn": True, "merge_mlp": True, "max_downsample": 8},
                     {"merge_attn": False}, {"min_timestep": 999.0}, {"strength": 0}):  # fmt: skip
        with tome_core.patch(model, **settings) as handle:
            assert torch.equal(family.call(model), vanilla)
        assert not handle.report().merged_anything
    with tome_core.patch(model) as handle:
        with handle.unmerged():
            assert torch.equal(family.call(model), vanilla)
        assert is_idle(handle)


@every_model
def test_removing_restores_every_bit_and_leaves_nothing_behind(family: Family):
    model = family.build()
    before, held, vanilla = traces(model), attributes(model), family.call(model)
    with tome_core.patch(model, ALL_LEVELS) as handle:
        family.call(model)
        ours = wraps_of(handle)
        assert model.state_dict().keys() == family.build().state_dict().keys() and handle.is_installed
    assert not handle.is_installed and not tome_core.report(model).patched
    assert traces(model) == before and torch.equal(family.call(model), vanilla)
    for _ in range(2):
        assert wraps_of(tome_core.patch(model, ALL_LEVELS)) == ours, "a compiler knows these objects"
        family.call(model)
        assert tome_core.remove_patch(model) is model
    assert traces(model) == before and attributes(model) == held and torch.equal(family.call(model), vanilla)


@any_model
def test_a_patch_over_a_patch_is_the_second_alone_and_leaving_a_with_brings_back_what_was_there(family: Family):
    model, once = family.build(), family.build()
    vanilla = family.call(model)
    tome_core.apply_patch(once, ratio=0.25)
    tome_core.apply_patch(model, ratio=0.75, merge_mlp=True)
    tome_core.apply_patch(model, ratio=0.25)
    outer = family.call(model)
    assert torch.equal(outer, family.call(once)) and traces(model) == traces(once)
    with tome_core.patch(model, ratio=0.5) as handle:
        middle = family.call(model)
        with tome_core.patch(model, ratio=0.75):
            assert not handle.is_installed and not torch.equal(family.call(model), middle)
        assert handle.is_installed and torch.equal(family.call(model), middle)
        tome_core.apply_patch(model, ratio=0.6)  # ends with the `with` in which it was put on
    assert torch.equal(family.call(model), outer)
    with handle:
        assert torch.equal(family.call(model), middle), "a handle that is entered again is there again"
    tome_core.remove_patch(model)
    assert not handle.is_installed and torch.equal(family.call(model), vanilla)
    with tome_core.patch(model, ratio=0.25) as outer:
        with tome_core.patch(model, ratio=0.75):
            outer.remove()
        assert torch.equal(family.call(model), vanilla), "what was removed meanwhile does not come back"
    for _ in range(3):
        latest = tome_core.patch(model, ratio=0.25)
    assert latest._previous._previous is None, "patches in a row do not pile up"


def layers_of(family: Family, model: Any) -> list[nn.Module]:
    """The modules without parts, in the order in which a call runs them."""
    called: list[nn.Module] = []
    with register_module_forward_pre_hook(lambda module, _: called.append(module)):
        family.call(model)
    return [module for module in called if not [*module.children()]]


@any_model
def test_an_error_anywhere_in_a_call_leaves_the_patch_usable_and_nothing_behind(family: Family):
    """The error comes at every kind of wrap, new kinds included, before and after the wrapped method."""
    model = family.build()
    before, vanilla, layers = traces(model), family.call(model), layers_of(family, model)
    handle = tome_core.patch(model, ALL_LEVELS)
    merged = family.call(model)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    for target in {type(wrap): wrap.target for wrap in wraps_of(handle)}.values():
        parts = set(target.modules())
        inside = [layer for layer in layers if layer in parts]
        for register in (inside[0].register_forward_pre_hook, inside[-1].register_forward_hook):
            with register(interrupt), pytest.raises(KeyboardInterrupt):
                family.call(model)
            assert is_idle(handle) and torch.equal(family.call(model), merged)
    handle.remove()
    assert torch.equal(family.call(model), vanilla) and traces(model) == before
