"""Both halves of guidance have one match, however a host cuts them into calls, and what is no half has its own."""

from __future__ import annotations

import diffusers
import pytest
import torch

import tome_core
from tests.models import on_small
from tests.samplings import CASE, KEPT, pipeline_of
from tests.sequences import PICTURE, attention
from tome_core import MergeConfig, MergeRule
from tome_core.engine import plan_cache, state
from tome_core.hosting import state_of
from tome_core.models.unet_blocks import find_blocks


def guided(handle, model, calls, timestep, pictures):
    """Two pictures' predictions for a prompt and a negative one, in as many batches as there are calls.

    calls: of each, which halves it holds. Returns the groups that each call merged by.
    """
    x, text = torch.randn(2, 4, 16, 16, generator=seeded(0)), torch.randn(4, 7, 32, generator=seeded(9))
    groups = []
    handle.keep_maps()
    for halves in calls:
        handle.set_time(timestep=timestep, sampling="a", pictures=pictures)
        with torch.no_grad():
            CASE.call(model, torch.cat([x] * len(halves)), timestep, torch.cat([text.chunk(2)[one] for one in halves]))
        groups.append(torch.cat([one.group for _, one in sorted(handle.maps().items())], 1))
    return groups


def seeded(number):
    return torch.Generator().manual_seed(number)


@pytest.mark.parametrize("config", [KEPT, on_small("quality"), on_small("max")])
def test_both_halves_of_guidance_have_one_match_however_they_are_cut(model, config):
    def draw(calls, pictures=2):
        with tome_core.patch(model, config, host_clock=True) as handle:
            return [guided(handle, model, calls, timestep, pictures) for timestep in (900, 870, 300, 250)]

    apart = draw([(0, 1)], pictures=None)
    for (whole,), (one, other), (own,) in zip(draw([(0, 1)]), draw([(0,), (1,)]), apart, strict=True):
        assert torch.equal(whole[:2], whole[2:]) and torch.equal(one, other)
        assert not torch.equal(own[:2], own[2:]) and not torch.equal(whole[:1], whole[1:2]), "a match can be seen"
        assert (whole[:2] == one).float().mean() > 0.95, "equal but for rounding"


# --- the seam ---------------------------------------------------------------------------------------------------------

HALVES = [attention(PICTURE, seed=seed) for seed in (1, 2)]  # of two pictures, for a negative prompt and for a prompt


def latents(seed=0, side=16):
    return torch.randn(2, 4, side, 24, generator=seeded(seed))


@pytest.fixture
def asked():
    """A state, and a call of its model: gives the groups of each sample. halves: those in its batch."""
    state = state_of(KEPT, 1)
    state.keep_maps()

    def call(halves, timestep=900, latent=None, sampling="a", pictures=2):
        latent = torch.cat([latents()] * len(halves)) if latent is None else latent
        own = HALVES[0]._replace(**{name: torch.cat([getattr(HALVES[one], name) for one in halves]) for name in "qkv"})
        state.set_time(timestep=timestep, sampling=sampling, pictures=pictures)
        with torch.no_grad():
            state.attend(state.begin(timestep, latent), "a", 0, PICTURE, own)
        return state.maps()[0].group

    return call


def is_shared(group):
    return torch.equal(*group.chunk(2))


def test_a_call_in_which_nobody_guides_has_no_halves(asked):
    assert not is_shared(asked((0, 1), pictures=None))


def test_each_step_may_be_cut_in_its_own_way(asked, work):
    """And a match is as old as it is, whichever call it serves."""
    group = asked((0, 1))
    assert is_shared(group) and work == ["match"]
    for timestep, done in ((850, 1), (790, 2)):
        one, other = (asked(halves, timestep) for halves in ((0,), (1,)))
        assert torch.equal(one, other) and len(work) == done
        assert torch.equal(one, group[:2]) == (done == 1)


def test_halves_of_other_latents_keep_apart(asked, work):
    """Of a picture in tiles the host says the same, whatever their sizes."""
    asked((0, 1))
    tiles = [torch.cat([latents(seed, side)] * 2) for seed, side in ((1, 16), (1, 8))]
    assert all(is_shared(asked((0, 1), latent=tile)) for tile in tiles)
    assert work == ["match"] * 3, "each a match of its own, for both of its halves"
    assert not is_shared(asked((0, 1), latent=torch.cat([latents(1), latents(2)]))), "what is no copy has its own"


def test_the_next_sampling_is_looked_at_anew(asked):
    assert is_shared(asked((0, 1)))
    assert not is_shared(asked((0, 1), latent=torch.cat([latents(1), latents(2)]), sampling="b"))


def test_copies_of_one_latent_tell_themselves(asked):
    group = asked((0, 1), latent=latents()[:1].expand(4, -1, -1, -1), pictures=None)
    assert (group == group[:1]).all()


def test_a_rule_that_keeps_nothing_shares_nothing(work):
    early = MergeRule(side="kv", ratio=0.75, keep=100.0, min_timestep=500.0, use_rand=False)
    state = state_of(MergeConfig(rules=(early, MergeRule(side="kv", ratio=0.5, use_rand=False))), 1)
    for timestep, kept in ((900, True), (400, False)):
        state.set_time(timestep=timestep, sampling=timestep, pictures=2)
        with torch.no_grad():
            state.attend(state.begin(timestep, latents()), "a", 0, PICTURE, HALVES[0])
        assert bool(state.time._sampling._plans) == kept


def test_the_first_step_alone_is_looked_at(asked, monkeypatch):
    looked = []
    monkeypatch.setattr(plan_cache, "_share", lambda *args, real=plan_cache._share: looked.append(1) or real(*args))
    for timestep in (900, 800, 700):
        for halves in ((0,), (1,)):
            asked(halves, timestep)
    assert len(looked) == 2, "for each call of a step"


@pytest.mark.parametrize("wrong", [0, -1, 1.5, "2"])
def test_a_number_of_pictures_that_is_none_is_refused(wrong):
    one = state_of(KEPT, 1)
    with pytest.raises(ValueError, match="pictures="):
        one.set_time(timestep=500, sampling="a", pictures=wrong)
    with pytest.raises(ValueError, match="pictures="), one.sampling(pictures=wrong):
        pass


# --- pipelines --------------------------------------------------------------------------------------------------------


def groups_of(kind, tiny_folder, prompts, **settings) -> torch.Tensor:
    """Of what the last step of a picture merged at the finest level: the group of each token, a row a sample."""
    pipe = pipeline_of(tiny_folder, kind)
    with tome_core.patch(pipe, KEPT) as handle:
        handle.keep_maps()
        pipe(prompts, num_inference_steps=2, output_type="latent", **settings)
        return handle.maps()[0].group


@pytest.mark.parametrize("guidance", [1.0, 7.5])
def test_a_pipeline_says_whether_it_guides(tiny_folder, guidance):
    group = groups_of(diffusers.StableDiffusionPipeline, tiny_folder, ["a", "b"], guidance_scale=guidance,
                      generator=[seeded(1), seeded(2)])  # fmt: skip
    assert group.shape[0] == (4 if guidance > 1 else 2)
    halves = group.chunk(2)
    assert torch.equal(*halves) == (guidance > 1), "two pictures are no halves of one"


@pytest.mark.parametrize("guidance", [1.0, 7.5])
def test_a_perturbed_copy_is_merged_by_the_match_of_the_others(tiny_folder, guidance):
    """Perturbed attention guidance takes a difference with it, too."""
    group = groups_of(diffusers.StableDiffusionPAGPipeline, tiny_folder, "a", guidance_scale=guidance, pag_scale=3.0,
                      generator=seeded(1))  # fmt: skip
    assert (group == group[:1]).all()


def test_of_a_pipelines_batch_the_prompts_half_is_matched(pipe, monkeypatch):
    seen, whole, plain = [], [], state.match
    monkeypatch.setattr(state, "match", lambda k, *rest: seen.append(k.flatten(2)) or plain(k, *rest))
    places = find_blocks(pipe.unet)  # the first block has not heard of a prompt yet
    last = [place.block for place in places if place.halvings == min(one.halvings for one in places)][-1]
    hook = last.attn1.to_k.register_forward_hook(lambda module, args, out: whole.append(out))
    with tome_core.patch(pipe, KEPT):
        pipe("a", num_inference_steps=1, output_type="latent")
    hook.remove()
    assert torch.equal(seen[-1], whole[-1][1:]) and not torch.equal(*whole[-1].chunk(2))
