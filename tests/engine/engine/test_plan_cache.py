"""A match that serves several steps: only inside one sampling, while it is young, and never for another call."""

from dataclasses import replace

import diffusers
import pytest
import torch

import tome_core
from tests.small_models.least_unet import KEPT
from tests.small_models.sd_pipelines import read_folder
from tests.small_models.sequences import PICTURE, attention
from tome_core import MergeConfig
from tome_core.engine import state as state_module
from tome_core.engine import time as times
from tome_core.hosting import state_of
from tome_core.merging.grid import Grid, Layout
from tome_core.models.unet_blocks import find_blocks


@pytest.fixture(autouse=True)
def sampling_needs_no_gradients():
    with torch.no_grad():  # a match is kept only under this rule
        yield


@pytest.fixture
def state():
    return state_of(KEPT, 1)


def seeded(number):
    return torch.Generator().manual_seed(number)


def call(state, timestep, names=("a",), layout=PICTURE, **facts):
    inputs = attention(layout, **facts)
    now = state.begin(timestep, inputs.q[:, layout.first :, :1, :1].transpose(1, 3))
    for name in names:
        state.attend(now, name, 0, layout, inputs)


def attend(state, timestep, sampling="s", **facts):
    """Make the same call in a sampling that the host has named."""
    state.set_time(timestep=timestep, sampling=sampling)
    call(state, timestep, **facts)


@pytest.mark.parametrize("settings, then", [({}, "renew"), ({"refine": 0}, "match"), ({"method": "cluster"}, "match")])
def test_a_match_serves_the_steps_that_are_near_in_time_and_is_renewed_then_by_k_means(settings, then, work):
    state = state_of(replace(KEPT, **settings), 1)
    for timestep, done in ((900, 2), (850, 2), (800, 2), (799, 4), (699, 4), (698, 6)):
        attend(state, timestep, names=("a", "b"))
        assert len(work) == done
    assert work == ["match"] * 2 + [then] * 4


def test_a_match_serves_no_other_sampling_and_nothing_outside_of_one(state, work):
    for timestep, sampling in ((500, "one"), (495, "two"), (490, None), (480, None)):
        attend(state, timestep, sampling=sampling)
    state.set_time()
    call(state, 470)
    attend(state, 460, sampling="two")
    assert work == ["match"] * 6


def test_a_loop_of_ones_own_says_where_a_picture_begins_and_ends(state, work):
    """A sampling inside another, such as a detailer's, has its own matches and ends those of the outer sampling."""
    with state.sampling():
        for timestep in (900, 850, 800):
            call(state, timestep)
        assert len(work) == 1
        with state.sampling():
            call(state, 790)
        call(state, 780)
        assert len(work) == 3
    with pytest.raises(KeyboardInterrupt), state.sampling():
        call(state, 770)
        raise KeyboardInterrupt
    call(state, 765)
    assert work == ["match"] * 5, "after its end nothing serves"


EARLY = MergeConfig(side="kv", ratio=0.5, early_ratio=0.75, early_until=890.0, keep=1000.0, use_rand=False)


@pytest.mark.parametrize("config, second, facts", [
    (EARLY, PICTURE, {}), (KEPT, PICTURE, {"batch": 1}), (KEPT, PICTURE, {"behind": 1}),
    (KEPT, Layout(Grid(24, 16), PICTURE.first), {})], ids=["rule", "batch", "text", "grid"])  # fmt: skip
def test_another_shape_or_rule_matches_for_itself(config, second, facts, work):
    state = state_of(config, 1)
    attend(state, 900)
    attend(state, 880, layout=second, **facts)
    assert work == ["match"] * 2


def test_nothing_is_kept_where_a_backward_pass_may_follow_nor_for_a_cuda_graph(state, work, monkeypatch):
    """A graph's replays use the memory of its tensors, which may be gone; and no code may wait for the device."""
    with torch.enable_grad():
        attend(state, 900)
        attend(state, 890)
    assert work == ["match"] * 2
    for timestep, captured, done in ((880, False, 3), (870, True, 4), (860, False, 4)):
        monkeypatch.setattr(times, "is_captured", lambda x, captured=captured: captured)
        attend(state, timestep)
        assert len(work) == done  # the last call uses the match from before the graph


def test_each_sampling_looks_anew_whether_its_batch_is_made_of_copies_and_one_expanded_latent_says_so_itself(state):
    state.keep_maps()
    latent, other = torch.randn(2, 1, 4, 16, 24, generator=seeded(0))
    expanded = latent.expand(2, -1, -1, -1)
    batches = (torch.cat([latent, latent]), 1, True), (torch.cat([latent, other]), 1, False), (expanded, None, True)
    for name, (batch, pictures, is_shared) in enumerate(batches):
        state.set_time(timestep=900, sampling=name, pictures=pictures)
        state.attend(state.begin(900, batch), "a", 0, PICTURE, attention(PICTURE))
        assert torch.equal(*state.maps()[0].group.expand(2, -1)) == is_shared


def drawn(pipe, prompts=("a",), steps=6, seed=1, **more):
    generators = [seeded(seed + number) for number in range(len(prompts))]
    return pipe(list(prompts), num_inference_steps=steps, generator=generators, output_type="latent", **more).images


def test_a_pipeline_names_its_samplings_and_a_picture_that_is_done_leaves_no_match_behind(pipe, work):
    with tome_core.patch(pipe, replace(KEPT, keep=400.0)) as handle:
        blocks = handle.report().levels[0].blocks
        drawn(pipe)
        first, work[:] = list(work), []
        assert first.count("match") == blocks and 0 < first.count("renew") < 5 * blocks
        pipe.scheduler = diffusers.DDIMScheduler.from_config(pipe.scheduler.config)  # set after the patch
        second = drawn(pipe, seed=2)
        assert work == first and handle.time._mine.latest is None
    with tome_core.patch(pipe, replace(KEPT, keep=400.0)):
        assert torch.equal(drawn(pipe, seed=2), second)


@pytest.mark.parametrize("kind, prompts, guidance, more, matches", [
    (diffusers.StableDiffusionPipeline, "ab", 1.0, {}, [0, 1]),
    (diffusers.StableDiffusionPipeline, "ab", 7.5, {}, [0, 1, 0, 1]),
    (diffusers.StableDiffusionPAGPipeline, "a", 7.5, {"pag_scale": 3.0}, [0])], ids=["plain", "guided", "perturbed"])
def test_a_pipeline_says_of_how_many_copies_its_batch_is(tiny_folder, kind, prompts, guidance, more, matches):
    """Perturbed attention guidance compares with its copy too; two pictures are no copies of one."""
    pipe = read_folder(tiny_folder, kind)
    with tome_core.patch(pipe, KEPT) as handle:
        handle.keep_maps()
        drawn(pipe, prompts, steps=2, guidance_scale=guidance, **more)
    groups = handle.maps()[0].group.tolist()
    assert [groups.index(group) for group in groups] == matches


def test_of_a_pipelines_batch_the_prompts_half_is_matched(pipe, monkeypatch):
    """PSNR is 1 to 3 dB higher then at a guidance of 1.5."""
    matched, keys, match = [], [], state_module.match
    monkeypatch.setattr(state_module, "match", lambda k, *rest: matched.append(k.flatten(2)) or match(k, *rest))
    places = find_blocks(pipe.unet)  # keys of the first block do not depend on the prompt yet
    last = [place.block for place in places if place.halvings == min(place.halvings for place in places)][-1]
    last.attn1.to_k.register_forward_hook(lambda module, args, out: keys.append(out))
    with tome_core.patch(pipe, KEPT):
        drawn(pipe, steps=1)
    assert torch.equal(matched[-1], keys[-1][1:]) and not torch.equal(*keys[-1].chunk(2))
