"""One contract, every model family: what patching, calling and unpatching have to mean whatever the model is."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest
import torch

import tome_core
from tests.families import every_family, every_family_in_time, largest_difference
from tests.models import CASES, ModelCase, call_case, inputs, merge_with_self
from tests.thoroughness import some_quick
from tests.traces import traces
from tome_core import MergeConfig
from tome_core.merging.grid import split_grid
from tome_core.merging.methods import METHODS, bipartite
from tome_core.model.families import find_blocks, find_unet
from tome_core.model.switch import switch_of

EVERYTHING = {"ratio": 0.5, "merge_crossattn": True, "merge_mlp": True}
ALL_LEVELS = MergeConfig(max_downsample=8, **EVERYTHING)


@every_family_in_time
def test_ratio_zero_is_bit_exact_off(case: ModelCase):
    model = case.build()
    vanilla = call_case(case, model)
    tome_core.apply_patch(model, ratio=0, merge_crossattn=True, merge_mlp=True, max_downsample=8)
    assert torch.equal(call_case(case, model), vanilla)
    tome_core.apply_patch(model, ratio=0.5, merge_attn=False)
    assert torch.equal(call_case(case, model), vanilla)


@every_family_in_time
@pytest.mark.parametrize("side", ["qkv", "kv"])
def test_merging_each_token_with_itself_changes_no_bit(case: ModelCase, side: str, monkeypatch):
    """The plumbing alone: every site merges and unmerges, and nothing but the plan may make a difference."""
    merge_with_self(monkeypatch)
    model = case.build()
    vanilla = call_case(case, model)
    plain = MergeConfig(max_downsample=8, proportional=False, side=side, **EVERYTHING)
    with tome_core.patch(model, plain) as handle:
        assert torch.equal(call_case(case, model), vanilla)
    with tome_core.patch(model, MergeConfig(max_downsample=8, side=side, **EVERYTHING)):
        assert largest_difference(call_case(case, model), vanilla) <= 1e-3  # other sums, and a UNet that amplifies them
    assert all(level.calls_merged >= level.blocks for level in handle.report().levels)


@every_family
@pytest.mark.parametrize("batch", some_quick([2, 1, 3]))
def test_merging_changes_the_picture_and_says_so(case: ModelCase, batch: int):
    model = case.build()
    vanilla = call_case(case, model, batch)
    assert tome_core.apply_patch(model, ratio=0.5) is model
    merged = call_case(case, model, batch)
    report = tome_core.report(model)
    assert merged.shape == vanilla.shape and merged.isfinite().all()
    assert largest_difference(merged, vanilla) > 1e-3
    level = report.levels[0]
    assert report.calls == 1 and level.calls_merged == level.blocks and not level.calls_skipped
    assert level.work_saved == pytest.approx(0.75)


@every_family_in_time
@pytest.mark.parametrize("method", list(METHODS))
def test_every_part_and_side_runs_at_every_level(case: ModelCase, method: str):
    model = case.build()
    vanilla = call_case(case, model)
    parts = {} if method == "downsample" else {"merge_crossattn": True, "merge_mlp": True}
    for side in METHODS[method].sides:
        with tome_core.patch(model, MergeConfig(method=method, side=side, max_downsample=8, **parts)) as handle:
            merged = call_case(case, model)
        assert merged.isfinite().all() and largest_difference(merged, vanilla) > 1e-3
        assert all(level.calls_merged for level in handle.report().levels)


@every_family_in_time
def test_a_call_by_keywords_is_the_same_call(case: ModelCase):
    model = case.build()
    tome_core.apply_patch(model, max_downsample=8, **EVERYTHING)
    by_position = call_case(case, model)
    unet = find_unet(model)
    names = list(inspect.signature(type(unet).forward).parameters)[1:]

    def call(*args, **kwargs):
        return unet(**dict(zip(names, args, strict=False)), **kwargs)

    assert torch.equal(call_case(case, call), by_position)


@every_family
def test_removing_restores_every_bit_and_leaves_nothing_behind(case: ModelCase):
    model = case.build()
    before, vanilla = traces(model), call_case(case, model)
    with tome_core.patch(model, ALL_LEVELS):
        call_case(case, model)
        assert model.state_dict().keys() == case.build().state_dict().keys()
    assert traces(model) == before and torch.equal(call_case(case, model), vanilla)
    for _ in range(3):
        tome_core.apply_patch(model, **EVERYTHING)
        call_case(case, model)
    assert tome_core.remove_patch(model) is model
    assert traces(model) == before and torch.equal(call_case(case, model), vanilla)
    assert tome_core.remove_patch(model) is model


@every_family_in_time
def test_a_patch_over_a_patch_is_the_second_alone(case: ModelCase):
    once, twice = case.build(), case.build()
    tome_core.apply_patch(once, ratio=0.25)
    tome_core.apply_patch(twice, ratio=0.75, merge_mlp=True)
    tome_core.apply_patch(twice, ratio=0.25)
    assert torch.equal(call_case(case, once), call_case(case, twice))
    assert traces(once) == traces(twice)


@every_family_in_time
def test_leaving_a_with_brings_back_what_was_there(case: ModelCase):
    model = case.build()
    vanilla = call_case(case, model)
    tome_core.apply_patch(model, ratio=0.25)
    outer = call_case(case, model)
    with tome_core.patch(model, MergeConfig(ratio=0.5)):
        middle = call_case(case, model)
        with tome_core.patch(model, MergeConfig(ratio=0.75)):
            inner = call_case(case, model)
        assert torch.equal(call_case(case, model), middle)
        tome_core.apply_patch(model, ratio=0.6)
    assert torch.equal(call_case(case, model), outer)
    tome_core.remove_patch(model)
    assert torch.equal(call_case(case, model), vanilla)
    assert len({picture.sum().item() for picture in (vanilla, outer, middle, inner)}) == 4


@every_family_in_time
def test_an_exception_in_mid_forward_leaves_the_patch_usable(case: ModelCase):
    model = case.build()
    vanilla = call_case(case, model)
    handle = tome_core.patch(model, ALL_LEVELS)
    merged = call_case(case, model)
    last = find_blocks(find_unet(model))[-1].block
    hook = last.attn2.to_q.register_forward_pre_hook(_raise)
    with pytest.raises(RuntimeError, match="interrupted"):
        call_case(case, model)
    hook.remove()
    switch = switch_of(find_unet(model))
    assert switch.call is None and switch.grid is None and switch.block is None
    assert torch.equal(call_case(case, model), merged)
    handle.remove()
    assert torch.equal(call_case(case, model), vanilla)


def test_a_handle_that_is_entered_again_is_there_again():
    case = CASES[0]
    model = case.build()
    handle = tome_core.patch(model, MergeConfig())
    merged = call_case(case, model)
    handle.remove()
    with handle:
        with tome_core.patch(model, MergeConfig(ratio=0.25)):
            pass
        assert torch.equal(call_case(case, model), merged)
    handle.remove()
    assert not handle.is_installed and not torch.equal(call_case(case, model), merged)


def _raise(*_):
    raise RuntimeError("interrupted")


@every_family_in_time
def test_a_deep_copy_and_a_pickle_have_their_own_state_and_weights(case: ModelCase):
    model = case.build()
    vanilla = call_case(case, model)
    tome_core.patch(model, MergeConfig(**EVERYTHING))
    merged = call_case(case, model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(call_case(case, other), merged)
        assert tome_core.report(other).calls == 2 and tome_core.report(model).calls == 1
        tome_core.remove_patch(other)
        assert torch.equal(call_case(case, other), vanilla) and traces(other) == traces(case.build())
        tome_core.patch(other, MergeConfig(**EVERYTHING))
        for parameter in find_unet(other).parameters():
            parameter.data.mul_(1.5)
        assert largest_difference(call_case(case, other), merged) > 1e-3
    assert torch.equal(call_case(case, model), merged)
    other = copy.deepcopy(model)
    tome_core.remove_patch(model)
    assert torch.equal(call_case(case, other), merged) and torch.equal(call_case(case, model), vanilla)


@every_family_in_time
def test_the_global_rng_is_left_alone_and_equal_seeds_give_equal_bits(case: ModelCase):
    model = case.build()
    tome_core.apply_patch(model, seed=3)
    state = torch.get_rng_state()
    first = call_case(case, model, timestep=321)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(17)
    call_case(case, model, batch=3, height=24, timestep=5, seed=1)
    assert torch.equal(call_case(case, model, timestep=321), first)
    tome_core.apply_patch(model, seed=4)
    assert not torch.equal(call_case(case, model, timestep=321), first)


@every_family_in_time
def test_conditional_and_unconditional_passes_may_run_apart(case: ModelCase, monkeypatch):
    """Same destinations, and a difference no larger than last-bit noise in the input makes."""
    drawn = []

    def split_and_note(*args):
        drawn.append(split_grid(*args))
        return drawn[-1]

    monkeypatch.setattr(bipartite, "split_grid", split_and_note)
    model = case.build()
    tome_core.apply_patch(model, ratio=0.5)
    together = call_case(case, model)
    apart = call_case(case, model, batch=1)
    for (whole, _), (part, _) in zip(drawn[: len(drawn) // 2], drawn[len(drawn) // 2 :], strict=True):
        assert torch.equal(whole[:1], part[:1])
    difference = largest_difference(apart, together[:1])
    noise = max(largest_difference(_call_with_noise(case, model, seed), together[:1]) for seed in range(8))
    assert difference <= max(4 * noise, 1e-5)


def _call_with_noise(case: ModelCase, model, seed: int) -> torch.Tensor:
    x, text = inputs(case.in_channels, 1, 16, 16, frames=case.frames)
    bits = torch.randint(-1, 2, x.shape, generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        return case.call(model, x * (1 + bits * 2.0**-23), 500, text)
