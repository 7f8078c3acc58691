"""A match that serves several steps: only inside one sampling, only while it is young, and never for another call."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import diffusers
import pytest
import torch

import tome_core
from benchmarks.sd_block import make_block, make_inputs
from benchmarks.speed_costs import OperatorCount
from tests.models import call_case
from tests.samplings import CASE, KEPT, blocks
from tests.traces import wraps_of
from tome_core import MergeConfig
from tome_core.merging import kernels
from tome_core.running import run
from tome_core.engine.plan_cache import Sampling
from tome_core.unet import parts


def step(model, handle, timestep, sampling="a", **call):
    handle.set_time(timestep=timestep, sampling=sampling)
    return call_case(CASE, model, timestep=timestep, **call)


def test_a_match_serves_the_steps_that_are_near_in_time(model, work):
    with tome_core.patch(model, KEPT) as handle:
        for timestep in (900, 850, 800):
            step(model, handle, timestep)
        assert work == ["match"] * blocks(handle)
        step(model, handle, 799)
        assert work == ["match"] * blocks(handle) + ["renew"] * blocks(handle)
        step(model, handle, 700)
        assert len(work) == 2 * blocks(handle)


def test_without_a_named_sampling_nothing_is_kept(model, work):
    with tome_core.patch(model, KEPT) as handle:
        for _ in range(2):
            call_case(CASE, model)
            handle.set_time(timestep=500)
            call_case(CASE, model)
    assert work == ["match"] * 4 * blocks(handle)


def test_a_picture_does_not_depend_on_the_one_before(model):
    def draw(handle, name, steps):
        return [step(model, handle, t, name, seed=t % 7) for t in steps]

    for steps in ((900, 600, 550), (500,), (500, 500)):
        with tome_core.patch(model, KEPT) as handle:
            draw(handle, "other", (900, 860, 550, 500))
            second = draw(handle, "this", steps)
        with tome_core.patch(model, KEPT) as handle:
            fresh = draw(handle, "this", steps)
        assert all(map(torch.equal, second, fresh))


def test_the_calls_of_one_time_keep_apart(model):
    """Tiles of one size: each finds its own match again, as it would were it the only one."""

    def second(tiles):
        with tome_core.patch(model, KEPT) as handle:
            pictures = [(one, step(model, handle, time, "tiles", seed=one)) for time in (900, 850) for one in tiles]
        return [picture for one, picture in pictures if one == 2]

    assert all(map(torch.equal, second((1, 2, 3)), second((2,))))


TWO_RULES = MergeConfig(side="kv", ratio=0.5, early_ratio=0.75, keep=1000.0, use_rand=False)


@pytest.mark.parametrize(("config", "steps"), [
    (KEPT, [(900, {}), (880, {"height": 24}), (860, {})]), (TWO_RULES, [(520, {}), (480, {})]),
], ids=["shape", "rule"])  # fmt: skip
def test_another_shape_or_rule_matches_for_itself(model, work, config, steps):
    with tome_core.patch(model, config) as handle:
        for timestep, shape in steps:
            step(model, handle, timestep, **shape)
    assert work == ["match"] * 2 * blocks(handle)


def test_nothing_is_kept_where_a_backward_pass_may_follow(model, work):
    with tome_core.patch(model, KEPT) as handle:
        for timestep in (900, 880):
            handle.set_time(timestep=timestep, sampling="a")
            x, text = torch.randn(1, 4, 16, 16), torch.randn(1, 7, 32)
            CASE.call(model, x, timestep, text).sum().backward()
    assert work == ["match"] * 2 * blocks(handle)


def test_nothing_is_kept_in_a_cuda_graph_nor_taken_into_one(model, work, monkeypatch):
    """Its replays write where its tensors lie, and read what may be gone; and nothing may wait for the device."""
    with torch.no_grad(), tome_core.patch(model, KEPT) as handle:
        step(model, handle, 900)
        with monkeypatch.context() as recording:
            recording.setattr(run, "is_captured", torch.is_tensor)
            step(model, handle, 880)
        assert work == ["match"] * 2 * blocks(handle)
        step(model, handle, 860)
        assert work == ["match"] * 2 * blocks(handle), "what was kept before is still there"


def test_a_cuda_graph_that_is_recorded_at_once_merges_as_any_call(model, monkeypatch):
    """Nothing has to run before it: no way is tried out, and no value is waited for."""
    config = MergeConfig(side="kv", ratio=0.75, use_rand=False)
    with tome_core.patch(model, config) as handle:
        expected, routes = call_case(CASE, model), handle.report().levels[0].routes
    monkeypatch.setattr(run, "is_captured", torch.is_tensor)
    monkeypatch.setattr(parts, "is_captured", torch.is_tensor)
    with tome_core.patch(CASE.build(), config) as handle:
        handle.keep_maps()
        assert torch.equal(call_case(CASE, handle.model), expected)
        assert handle.report().levels[0].routes == routes
        assert not handle.maps(), "its replays write where a map lies"


def test_a_copy_keeps_nothing_of_its_original(model, work):
    with tome_core.patch(model, KEPT) as handle:
        step(model, handle, 900)
        other = copy.deepcopy(model)
        step(other, vars(other)["_tome_core_patch"].merging, 890)
    assert work == ["match"] * 2 * blocks(handle)


def test_giving_the_clock_back_forgets():
    sampling, found = Sampling(), []
    for name, time in (("a", 900.0), ("a", 850.0), (None, None), ("a", 800.0)):
        sampling.set(name, time)
        kept = sampling.next_call()
        found.append(kept and dict(kept.plans))
        if kept:
            kept.plans["x"] = 1
    assert found == [{}, {"x": 1}, None, {}]


@pytest.mark.parametrize("steps", [1, 6])
def test_a_pipeline_names_its_samplings(pipe, work, steps):
    def draw(seed):
        generator = torch.Generator().manual_seed(seed)
        return pipe("a", num_inference_steps=steps, generator=generator, output_type="latent").images

    config = MergeConfig(side="kv", ratio=0.75, keep=400.0, use_rand=False, refine=1)
    with tome_core.patch(pipe, config) as handle:
        draw(1)
        count = len(work)
        second = draw(2)
        assert work[count:] == work[:count] and work.count("match") == 2 * blocks(handle)
    assert steps == 1 or 0 < work.count("renew") < (steps - 1) * 2 * blocks(handle)
    with tome_core.patch(pipe, config):
        assert torch.equal(draw(2), second)


def test_a_picture_that_is_done_leaves_no_match_behind(pipe):
    counts = []

    def note(*_):
        counts.append(len(handle.run._mine.sampling._plans))
        return {}

    with tome_core.patch(pipe, KEPT) as handle:
        for _ in range(2):  # the second with a scheduler that came after the patch
            pipe("a", num_inference_steps=4, output_type="latent", callback_on_step_end=note)
            shared = 2 * blocks(handle)  # what serves both halves, and the plan of the batch of both
            assert counts == [shared] * 4 and not handle.run._mine.sampling._plans
            counts.clear()
            pipe.scheduler = diffusers.DDIMScheduler.from_config(pipe.scheduler.config)
        pipe.unet(torch.randn(1, 4, 16, 16), torch.tensor(500), torch.randn(1, 7, 32))
        assert not handle.run._mine.sampling._plans


# --- a loop of one's own ----------------------------------------------------------------------------------------------


def test_a_loop_of_ones_own_says_where_a_picture_begins_and_ends(model, work):
    with tome_core.patch(model, KEPT) as handle:
        each = ["match"] * blocks(handle)
        for _ in range(2):
            with handle.sampling():
                for timestep in (900, 850, 800):
                    call_case(CASE, model, timestep=timestep)
        assert work == each * 2
        call_case(CASE, model, timestep=790)
        assert work == each * 3, "after its end nothing serves"
        assert not handle.run._mine.sampling._plans


def test_a_sampling_inside_of_another_is_one_of_its_own(model, work):
    """A detailer's picture, drawn in the middle of a picture by the same UNet."""
    with tome_core.patch(model, KEPT) as handle:
        with handle.sampling():
            call_case(CASE, model, timestep=900)
            with handle.sampling():
                call_case(CASE, model, timestep=890)
            call_case(CASE, model, timestep=880)
        assert work == ["match"] * 3 * blocks(handle)


def test_a_loop_that_breaks_off_forgets(model, work):
    with tome_core.patch(model, KEPT) as handle:
        with pytest.raises(KeyboardInterrupt), handle.sampling():
            call_case(CASE, model, timestep=900)
            raise KeyboardInterrupt
        assert not handle.run._mine.sampling._plans and not handle.run._mine.scopes
        with handle.sampling():
            call_case(CASE, model, timestep=890)
    assert work == ["match"] * 2 * blocks(handle)


def added_by_a_kept_match(**settings: Any) -> int:
    """Operators that a block runs beyond its own where an earlier step has matched."""
    block, arguments = make_block(), make_inputs(32, 2, "cpu", torch.float32)
    config = replace(KEPT, **settings)
    with torch.inference_mode(), tome_core.patch(block, config) as handle:
        counts = []
        for timestep in (200, 180, 160, None):
            handle.set_time(timestep=timestep, sampling="a")
            if timestep is None:
                handle.uninstall()
            with OperatorCount() as counter:
                block(*arguments)
            counts.append(counter.count)
    first, second, third, vanilla = counts
    assert first > second == third
    return second - vanilla


@pytest.fixture
def one_kernel_a_mean(monkeypatch):
    """As on a GPU with Triton: one launch makes all the means."""
    monkeypatch.setattr(kernels, "DEVICES", ("cpu",))
    monkeypatch.setattr(kernels, "ready", lambda x: True)
    monkeypatch.setattr(kernels, "best_keys", lambda *_: None)
    monkeypatch.setattr(kernels, "correct", lambda *_: None)

    def means(x, order, offsets, tokens, bias=False, values=None):
        mean = x[: x.shape[0] // tokens * (len(offsets) - 1)].clone()
        both = values is not None
        return kernels.Means(mean, mean[:, 0].float() if bias else None, mean if both else None,
                             mean.float() if both else None)  # fmt: skip

    monkeypatch.setattr(kernels, "mean_rows", means)


def test_a_kept_match_adds_one_kernel_to_a_small_block_on_a_gpu(one_kernel_a_mean, request):
    """A correction adds a product, queries and answers side by side for it, and their sum; wider heads add four more: k
    is scaled; q, k and v are widened.
    """
    assert added_by_a_kept_match(correction=False) == 1
    assert added_by_a_kept_match() == 4
    request.getfixturevalue("wide_heads")
    assert added_by_a_kept_match(correction=False) == 5


def test_a_kept_match_adds_three_operators_to_a_block_on_a_cpu():
    """Zeros, the sum over each group, and its division."""
    assert added_by_a_kept_match(correction=False) == 3
    assert added_by_a_kept_match() == 6


def test_a_removed_patch_keeps_nothing_of_its_pictures(model):
    handle = tome_core.patch(model, KEPT)
    step(model, handle, 900)
    assert handle.run.sampling.next_call().plans
    call_case(CASE, model.train())
    memories = [wrap.memory for wrap in wraps_of(handle) if hasattr(wrap, "memory")]
    assert memories and all(one.calls for one in memories)
    handle.remove()
    assert handle.run.sampling.next_call() is None and not any(one.calls for one in memories)
