"""A match that serves several steps: only inside one sampling, only while it is young, and never for another call."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import diffusers
import pytest
import torch
from torch import nn

import tome_core
from benchmarks.sd_block import make_block, make_inputs
from tests import tiny_transformers
from tests.models import call_case
from tests.operators import VIEWS, OperatorCounter
from tests.samplings import CASE, KEPT, blocks
from tests.sequences import FILM, PICTURE, attention
from tome_core import MergeConfig
from tome_core.engine import time as times
from tome_core.engine.plan_cache import Sampling
from tome_core.hosting import state_of
from tome_core.merging import kernels
from tome_core.merging.grid import Grid, Layout


def attend(state, timestep, own=None, names=("a",), called=None, sampling="s", layout=PICTURE):
    """A call of a model with attentions of these names; their outputs."""
    own = attention(layout) if own is None else own
    state.set_time(timestep=timestep, sampling=sampling)
    call = state.begin(timestep, own.q[:, layout.first :, :1, :1].transpose(1, 3), called)
    return [state.attend(call, name, 0, layout, own) for name in names]


@pytest.fixture(autouse=True)
def sampling_needs_no_gradients():
    with torch.no_grad():  # under which alone anything is kept
        yield


@pytest.fixture
def state():
    return state_of(KEPT, 1)


def test_a_match_serves_the_steps_that_are_near_in_time(state, work):
    for timestep, done in ((900, 2), (850, 2), (800, 2), (799, 4), (699, 4), (698, 6)):
        attend(state, timestep, names=("a", "b"))
        assert len(work) == done
    assert work == ["match"] * 2 + ["renew"] * 4


@pytest.mark.parametrize(("settings", "second"), [
    ({"refine": 0}, "match"), ({"method": "cluster"}, "match"), ({}, "renew"),
])  # fmt: skip
def test_an_old_match_is_renewed_if_the_rule_refines_it(work, settings, second):
    state = state_of(replace(KEPT, **settings), 1)
    for timestep in (900, 700):
        attend(state, timestep)
    assert work == ["match", second]


def test_a_match_serves_no_other_sampling_and_nothing_outside_of_one(state, work):
    for timestep, sampling in ((500, "one"), (500, "two"), (490, None), (480, None)):
        attend(state, timestep, sampling=sampling)
    state.set_time()
    state.begin(470, torch.zeros(1, 4, 16, 24))
    assert work == ["match"] * 4


def test_the_calls_of_one_time_keep_apart(state, work):
    """Tiles of one size: each finds its own match again, as it would were it the only one."""
    tiles = [attention(PICTURE, seed=seed) for seed in (1, 2, 3)]
    first, second = ([attend(state, timestep, one)[0] for one in tiles] for timestep in (900, 850))
    assert work == ["match"] * 3
    assert all(map(torch.allclose, first, second)) and not torch.allclose(first[0], first[1])


def test_calls_with_names_find_their_own_in_any_order(state, work):
    one, two = attention(PICTURE, seed=1), attention(PICTURE, seed=2)
    expected = [attend(state, 500, own, called=name)[0] for own, name in ((one, "one"), (two, "two"))]
    found = [attend(state, 480, own, called=name)[0] for own, name in ((two, "two"), (one, "one"))]
    assert work == ["match"] * 2
    assert all(map(torch.allclose, found[::-1], expected))
    attend(state, 480, two, called="one")
    assert work == ["match"] * 3, "another call of that name, such as a tile"


@pytest.mark.parametrize("pictures", [None, 2], ids=["unguided", "guided"])
def test_calls_of_one_attention_in_one_call_of_the_model_keep_apart(state, work, pictures):
    """A host may cut a batch inside of the model: each piece has its own match, at this step and at the next."""
    whole, latent = attention(PICTURE, batch=4), torch.zeros(4, 4, 16, 24)
    pieces = [whole._replace(**{name: getattr(whole, name)[rows] for name in "qkv"})
              for rows in (slice(0, 2), slice(2, 4))]  # fmt: skip
    expected = attend(state_of(KEPT, 1), 900, whole)[0]
    work.clear()
    for timestep in (900, 880):
        state.set_time(timestep=timestep, sampling="s", pictures=pictures)
        call = state.begin(timestep, latent)
        found = torch.cat([state.attend(call, "a", 0, PICTURE, one) for one in pieces])
        torch.testing.assert_close(found, expected)
    assert work == ["match"] * 2


# settings; of the two steps, the picture's place in the sequence and how its tokens are made
OTHERS = {
    "rule": (MergeConfig(side="kv", ratio=0.5, early_ratio=0.75, early_until=890.0, keep=1000.0, use_rand=False),
             (PICTURE, {}), (PICTURE, {})),
    "batch": (KEPT, (PICTURE, {}), (PICTURE, {"batch": 1})),
    "grid": (KEPT, (PICTURE, {}), (Layout(Grid(24, 16), PICTURE.first), {})),
    "place": (KEPT, (PICTURE, {}), (Layout(PICTURE.grid, PICTURE.first - 1), {"behind": 1})),
    "text": (KEPT, (PICTURE, {}), (PICTURE, {"behind": 1})),
    "frames": (KEPT, (FILM, {}), (Layout(Grid(*FILM.grid[:2])), {})),
}  # fmt: skip


@pytest.mark.parametrize("other", OTHERS)
def test_another_shape_or_rule_matches_for_itself(work, other):
    config, *steps = OTHERS[other]
    state = state_of(config, 1)
    for timestep, (layout, facts) in zip((900, 880), steps, strict=True):
        attend(state, timestep, attention(layout, **facts), layout=layout)
    assert work == ["match"] * 2


def test_a_match_serves_no_other_device(state, work):
    """The model may have been moved between two steps."""
    attend(state, 900)
    kept = state.time._sampling._plans
    kept.update({key: plans._replace(device=torch.device("meta")) for key, plans in kept.items()})
    attend(state, 880)
    assert work == ["match"] * 2


def test_giving_the_clock_back_forgets():
    sampling, found = Sampling(), []
    for name, time in (("a", 900.0), ("a", 850.0), (None, None), ("a", 800.0)):
        sampling.set(name, time)
        kept = sampling.next_call()
        found.append(kept and dict(kept.plans))
        if kept:
            kept.plans["x"] = 1
    assert found == [{}, {"x": 1}, None, {}]


# --- models -----------------------------------------------------------------------------------------------------------


def unet():
    model = CASE.build()
    return model, lambda timestep, seed=0: call_case(CASE, model, timestep=timestep, seed=seed)


def transformer():
    model, arguments = tiny_transformers.make("Flux")

    def call(timestep, seed=0):
        generator = torch.Generator().manual_seed(seed)
        given = {"hidden_states": torch.randn(arguments["hidden_states"].shape, generator=generator),
                 "timestep": torch.full((1,), timestep / 1000)}  # fmt: skip
        return tiny_transformers.call(model, {**arguments, **given})

    return model, call


on_either = pytest.mark.parametrize("build", [unet, transformer])


@on_either
def test_a_picture_does_not_depend_on_the_one_before(build):
    model, call = build()

    def draw(handle, name, steps):
        found = []
        for timestep in steps:
            handle.set_time(timestep=timestep, sampling=name)
            found.append(call(timestep, seed=timestep % 7))
        return found

    for steps in ((900, 600, 550), (500,), (500, 500)):
        with tome_core.patch(model, KEPT) as handle:
            draw(handle, "other", (900, 860, 550, 500))
            second = draw(handle, "this", steps)
        with tome_core.patch(model, KEPT) as handle:
            fresh = draw(handle, "this", steps)
        assert all(map(torch.equal, second, fresh))


@on_either
def test_a_loop_of_ones_own_says_where_a_picture_begins_and_ends(build, work):
    model, call = build()
    with tome_core.patch(model, KEPT) as handle:
        each = ["match"] * blocks(handle)
        for _ in range(2):
            with handle.sampling():
                for timestep in (900, 850, 800):
                    call(timestep)
        assert work == each * 2
        call(790)
        assert work == each * 3, "after its end nothing serves"
        assert handle.time._mine.latest is None


@on_either
def test_a_sampling_inside_of_another_is_one_of_its_own(build, work):
    """A detailer's picture, drawn in the middle of a picture by the same model."""
    model, call = build()
    with tome_core.patch(model, KEPT) as handle:
        with handle.sampling():
            call(900)
            with handle.sampling():
                call(890)
            call(880)
        assert work == ["match"] * 3 * blocks(handle)


@on_either
def test_a_loop_that_breaks_off_forgets(build, work):
    model, call = build()
    with tome_core.patch(model, KEPT) as handle:
        with pytest.raises(KeyboardInterrupt), handle.sampling():
            call(900)
            raise KeyboardInterrupt
        assert not handle.time._mine.begun
        with handle.sampling():
            call(890)
    assert work == ["match"] * 2 * blocks(handle)


@on_either
def test_a_removed_patch_keeps_nothing_of_its_pictures(build):
    model, call = build()
    handle = tome_core.patch(model, KEPT)
    handle.set_time(timestep=900, sampling="a")
    call(900)
    assert handle.time._sampling._plans
    handle.remove()
    assert not handle.time._sampling._plans


class InPieces(nn.Module):
    """A transformer that gets its batch in pieces, as it does where films are drawn on small cards."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, hidden_states, encoder_hidden_states=None, return_dict=True, **more):
        parts = [self.inner(x, encoder_hidden_states=text, return_dict=False, **more)[0]
                 for x, text in zip(hidden_states.split(2), encoder_hidden_states.split(2), strict=True)]  # fmt: skip
        return (torch.cat(parts),)


def test_a_unet_that_cuts_its_batch_inside_gives_what_it_gives_in_one_piece(model):
    def draw():
        x, text = torch.randn(4, 4, 16, 16, generator=seeded(1)), torch.randn(4, 7, 32, generator=seeded(2))
        with tome_core.patch(model, KEPT) as handle:
            found = []
            for timestep in (900, 880):
                handle.set_time(timestep=timestep, sampling="a")
                found.append(CASE.call(model, x, timestep, text))
            assert handle.report().levels[0].calls_merged
        return found

    expected = draw()
    for block in (*model.down_blocks, *model.up_blocks):
        if hasattr(block, "attentions"):
            block.attentions = nn.ModuleList(map(InPieces, block.attentions))
    torch.testing.assert_close(draw(), expected, rtol=1e-3, atol=1e-4)


def seeded(number):
    return torch.Generator().manual_seed(number)


def test_nothing_is_kept_where_a_backward_pass_may_follow(model, work):
    with torch.enable_grad(), tome_core.patch(model, KEPT) as handle:
        for timestep in (900, 880):
            handle.set_time(timestep=timestep, sampling="a")
            x, text = torch.randn(1, 4, 16, 16), torch.randn(1, 7, 32)
            CASE.call(model, x, timestep, text).sum().backward()
    assert work == ["match"] * 2 * blocks(handle)


def test_nothing_is_kept_in_a_cuda_graph_nor_taken_into_one(model, work, monkeypatch):
    """Its replays write where its tensors lie, and read what may be gone; and nothing may wait for the device."""
    with tome_core.patch(model, KEPT) as handle:
        for timestep, captured, done in ((900, False, 1), (880, True, 2), (860, False, 2)):
            handle.set_time(timestep=timestep, sampling="a")
            with monkeypatch.context() as recording:
                recording.setattr(times, "is_captured", lambda x, captured=captured: captured)
                call_case(CASE, model, timestep=timestep)
            assert work == ["match"] * done * blocks(handle)  # the last finds what was kept before it


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
        counts.append(len(handle.time._mine.latest._plans))
        return {}

    with tome_core.patch(pipe, KEPT) as handle:
        for _ in range(2):  # the second with a scheduler that came after the patch
            pipe("a", num_inference_steps=4, output_type="latent", callback_on_step_end=note)
            shared = 2 * blocks(handle)  # what serves both halves, and the plan of the batch of both
            assert counts == [shared] * 4 and handle.time._mine.latest is None
            counts.clear()
            pipe.scheduler = diffusers.DDIMScheduler.from_config(pipe.scheduler.config)
        pipe.unet(torch.randn(1, 4, 16, 16), torch.tensor(500), torch.randn(1, 7, 32))
        assert handle.time._mine.latest is None


# --- what a kept match costs ------------------------------------------------------------------------------------------


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
            with OperatorCounter() as counter:
                block(*arguments)
            counts.append(sum(count for name, count in counter.by_name.items() if name not in VIEWS))
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

    def means(x, order, offsets, tokens, bias=False, values=None, exact=True):
        mean = x[: x.shape[0] // tokens * (len(offsets) - 1)].clone()
        both = values is not None
        return kernels.Means(mean, mean[:, 0].float() if bias else None, mean if both else None,
                             mean.float() if both and exact else None)  # fmt: skip

    monkeypatch.setattr(kernels, "mean_rows", means)


def test_a_kept_match_adds_one_kernel_to_a_small_block_on_a_gpu(one_kernel_a_mean):
    """For keys and values. A correction adds a product, queries and answers side by side, and their sum."""
    assert added_by_a_kept_match(correction=False) == 1
    assert added_by_a_kept_match() == 4


def test_a_kept_match_adds_six_operators_to_a_block_on_a_cpu():
    """For keys and for values: zeros, the sum over each group, and its division."""
    assert added_by_a_kept_match(correction=False) == 6
    assert added_by_a_kept_match() == 9
