"""Which passes of which jobs merge, and how long a match is kept, in the callback orders of the webuis."""

import copy
from contextlib import nullcontext

import pytest
import torch

from tests.host_doubles import webuis
from tests.host_doubles.webuis import ASKED, FLAVOURS, FREE, ON, SAVED, Denoiser, custom, merged_tokens, merges, report
from tests.small_models.unets import ldm_wrapped
from tests.thoroughness import some_quick
from tome_core import form
from tome_core.settings.schedule import STABLE_DIFFUSION

# off with any other settings, with a wrong strength, and without any argument
OFF = [(), (False,), ({**FREE, "strength": 0, "method": "cluster"},), (custom(0.0),), (True, 9.0)]
WHERE = {"everywhere": (True, True), "first pass": (True, False), "hires pass": (False, True)}


@pytest.mark.parametrize("flavour", some_quick(["sdnext", *FLAVOURS], 3))
def test_off_is_bit_identical_and_on_exactly_the_passes_that_are_asked_for_merge(webui):
    plain = webui.plain(enable_hr=True)
    for args in OFF:
        job = webui.job(*args, enable_hr=True)
        assert torch.equal(job.latents, plain.latents) and job.infotexts == [""], args
    webui.process(unmerged := webui.processing(webui, (False,), enable_hr=True))
    for where, merged in WHERE.items():
        job = webui.process(p := webui.processing(webui, (custom(where=where),), enable_hr=True))
        passes = [merged_tokens(job.extra_generation_params, name) != [] for name in ("first pass", "hires pass")]
        assert passes == [*merged] and torch.equal(p.first, unmerged.first) != merged[0]


@pytest.mark.parametrize("flavour", some_quick(FLAVOURS, 2))
def test_every_step_of_every_batch_merges(webui):
    job = webui.job(*ON, n_iter=3, batch_size=2)
    assert job.comments == f"ToMe: {ASKED}, 4 steps, {SAVED}\n"
    first = report(job)["passes"]["first pass"]
    assert [first[name] for name in ("batches", "steps", "steps_merged", "calls")] == [3, 12, 12, 12]


@pytest.mark.parametrize("flavour", ["a1111", "forge"])
def test_a_job_inside_a_job_has_its_own_wish_and_the_outer_job_goes_on(webui):
    inner, goes_on = [], []

    def between_batches(step):
        if step == "postprocess_image":
            inner.append(webui.job(False).latents)

    def between_steps(step):
        # the inner job begins after the outer step's announcement; from the third on its steps take the patch off
        if step == 1:
            inner.append(webui.plain().latents)
        elif step == 2:
            goes_on.append(merges(webui.unet))

    expected, alone = webui.plain().latents, webui.job(*ON, n_iter=2)
    for look in (between_batches, between_steps):
        job = webui.job(*ON, n_iter=2, at_step=look)
        assert job.comments == alone.comments
        assert look is between_steps or torch.equal(job.latents, alone.latents)
    assert goes_on == [True, True] and len(inner) == 4 and all(torch.equal(latents, expected) for latents in inner)


@pytest.mark.parametrize(("flavour", "args"), [("a1111", (False,)), ("forge", ON)])
def test_a_job_of_ours_inside_a_step_merges_as_it_asks_and_the_outer_one_goes_on(webui, args):
    inner, alone, expected = [], webui.job(*args), webui.job(*ON)
    outer = webui.job(*ON, at_step=lambda step: step == 1 and inner.append(webui.job(*args)))
    (job,) = inner
    assert job.latents.equal(alone.latents) and job.comments == alone.comments
    assert outer.latents.equal(expected.latents) and outer.comments == expected.comments


@pytest.mark.parametrize("flavour", some_quick(FLAVOURS, 2))
def test_a_pass_lives_as_long_as_the_samplers_call_and_nothing_stays_on_the_job_or_its_sampler(webui):
    seen, names = [], ("sample", "sample_img2img")

    def at(place):
        """In front of the sampler's call its methods are ours; nothing is on the model."""
        seen.append((place, merges(webui.unet), [name in vars(p.sampler) for name in names]))

    def at_step(step):
        if step == 2:
            seen.append(("step", merges(webui.unet), [name in vars(p.sampler) for name in names]))

    ours, webui.script = webui.script, None
    webui.process(plain := webuis.Processing(webui, (), enable_hr=True))
    webui.script = ours
    webui.process(p := webuis.Processing(webui, ON, enable_hr=True, at=at, at_step=at_step))
    before, during, after = (False, [True, True]), (True, [False, False]), (False, [False, False])
    assert seen == [("conditioning", *before), ("step", *during), ("upscale", *after), ("conditioning", *before),
                    ("step", *during), ("decode", *after)]  # fmt: skip
    assert set(vars(p)) - {"at", "at_step"} == set(vars(plain)) and not vars(p.sampler).keys() - vars(plain.sampler)


def test_another_extensions_method_of_the_sampler_stays_and_one_that_keeps_ours_begins_no_pass(webui):
    called = []

    def at(place):
        """Another extension wraps the method when ours is on it, and never takes its own off."""
        if place == "conditioning":
            ours = p.sampler.sample
            p.sampler.sample = lambda *args: called.append(1) or ours(*args)

    p = webuis.Processing(webui, ON, at=at)
    assert f", 4 steps, {SAVED}" in webui.process(p).comments and called == [1]
    wrapped = p.sampler.sample
    plain = webui.plain().latents
    around_next, begun = webui.part("around_sampling").around_next, []
    x = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(7))
    around_next(p, lambda p: pytest.fail("it was replaced"))
    around_next(p, lambda p: begun.append(p) or nullcontext())
    ours = p.sampler.sample
    assert torch.equal(ours(copy.copy(p), x), plain) and not begun, "a copy of the job"
    for _ in range(2):
        assert torch.equal(ours(p, x), plain) and begun == [p] and p.sampler.sample is wrapped


@pytest.mark.parametrize("flavour", ["a1111", "forge"])
def test_the_refiner_merges_too(webui):
    first, second = webui.shared.sd_model, ldm_wrapped()
    comments = webui.job(*ON, refiner=second).comments
    assert comments == f"ToMe: {ASKED}, 4 steps, 3% less work\n", "it has a level more"
    assert not merges(second)
    webui.shared.sd_model = first


def test_hypertile_and_an_active_sd_unet_are_left_alone_and_named(webui):
    expected, settings = webui.plain().latents, webui.shared.opts.data
    settings["hypertile_enable_unet_secondpass"] = True
    comments = webui.job(*ON, enable_hr=True).comments
    assert f"first pass: 4 steps, {SAVED}; hires pass: nothing merged: HyperTile" in comments
    settings["hypertile_enable_unet"] = True
    job = webui.job(*ON)
    assert torch.equal(job.latents, expected) and "HyperTile is on" in job.comments
    settings["hypertile_enable_unet"] = False
    webui.put("modules.sd_unet", current_unet=object())
    job = webui.job(*ON)
    assert torch.equal(job.latents, expected) and "an SdUnet" in job.comments


# matches are kept over the steps of a pass, and never over pictures, tiles or halves of a split batch
KEPT = custom(keep=1000.0, use_rand=False)
BALANCED = {**form.values_at("balanced"), **FREE}


class SplitDenoiser(Denoiser):
    """A denoiser that calls the model once for each prompt, as with batch_cond_uncond off."""

    def guided(self, x, timestep):
        cond = self.run(x, timestep, webuis.PROMPT)
        uncond = self.run(x, timestep, torch.zeros_like(webuis.PROMPT))
        return uncond + 2 * (cond - uncond)


class TiledDenoiser(Denoiser):
    """Tiled Diffusion's denoiser: after the step's announcement one call for each tile, all of one shape."""

    def guided(self, x, timestep):
        return torch.cat([self.run(tile, timestep, webuis.PROMPT) for tile in x.split(8, dim=3)], dim=3)


@pytest.mark.parametrize(("flavour", "denoiser", "matches"),
                         [("forge", Denoiser, 1), ("a1111", webuis.CFGDenoiserTimesteps, 1),
                          ("a1111", SplitDenoiser, 1), ("a1111", TiledDenoiser, 2)])  # fmt: skip
def test_a_passes_steps_and_both_prompts_have_one_match_and_each_tile_its_own(webui, monkeypatch, denoiser, matches):
    state, done = webui.engine("engine.state"), []
    match = state.match
    monkeypatch.setattr(state, "match", lambda *args: done.append(args) or match(*args))
    (level,) = report(webui.job(KEPT, denoiser=denoiser, size=16))["passes"]["first pass"]["levels"]
    assert len(done) == matches * level["blocks"] > 0


@pytest.mark.parametrize(("denoiser", "args"), [(Denoiser, BALANCED), (SplitDenoiser, KEPT), (TiledDenoiser, KEPT)])
def test_a_picture_is_the_same_after_another_and_in_a_batch_of_its_own(webui, denoiser, args):
    facts = {"enable_hr": denoiser is Denoiser, "denoiser": denoiser, "size": 16}
    both = webui.job(args, seed=7, n_iter=2, **facts).latents
    webui.job(args, seed=3, **facts)
    assert torch.equal(webui.job(args, seed=8, **facts).latents, both[1:])


@pytest.mark.parametrize(("flavour", "denoiser"), [("a1111", Denoiser), ("forge", webuis.CFGDenoiserTimesteps)])
def test_a_hires_pass_that_begins_late_leaves_the_work_that_its_mark_promises(webui, monkeypatch, denoiser):
    times = tuple(500.0 - 50 * step for step in range(10))
    monkeypatch.setattr(webuis, "SIGMAS", tuple(STABLE_DIFFUSION.sigma_of(time) for time in times))
    monkeypatch.setattr(webuis, "TIMESTEPS", times)
    levels = report(webui.job(BALANCED, enable_hr=True, denoiser=denoiser))["passes"]["hires pass"]["levels"]
    early, late = sorted(levels[0]["merged"], key=lambda kind: kind["keys"])
    assert late["calls"] / (early["calls"] + late["calls"]) == pytest.approx(0.4)
