"""A pass that begins late leaves the work that its mark promises; a whole picture's boundary stays."""

from __future__ import annotations

import math

import diffusers
import pytest
import torch
from diffusers import StableDiffusionImg2ImgPipeline, StableDiffusionXLImg2ImgPipeline

import tome_core
from tests import models, tiny_pipeline
from tome_core import strength
from tome_core.engine.time import FEW, WHOLE_FROM, Clock, boundary_in

HALF = [500.0 - 50 * step for step in range(10)]
WHOLE = [999.0 - 100 * step for step in range(10)]
KARRAS = [470.0, 380.0, 295.0, 225.0, 165.0, 110.0, 65.0, 30.0, 8.0, 1.0]


def late_in(timesteps, until):
    boundary = boundary_in(timesteps, until)
    return sum(one < boundary for one in timesteps)


@pytest.mark.parametrize("begins", [WHOLE_FROM - 1, 600.0, 500.0, 300.0, 50.0])
def test_the_late_share_of_steps_is_a_whole_pictures_to_the_nearest_step(begins):
    for until in range(0, 1001, 25):
        for count in (1, 2, 3, 5, 10, 20, 33):
            steps = [begins * (1 - step / count) for step in range(count)]
            assert abs(late_in(steps, until) - count * until / 1000) <= 0.5, (until, count)
            assert late_in(steps[::-1], until) == late_in(steps, until)
    assert late_in(KARRAS, 375) == 4, "however they are spread"


def test_a_whole_picture_and_no_steps_have_no_boundary_of_their_own():
    assert boundary_in(WHOLE, 375) is boundary_in([], 375) is boundary_in([WHOLE_FROM], 375) is None


def test_a_whole_picture_of_few_steps_has_at_least_its_share_of_late_ones():
    for count in range(1, FEW + 1):
        trailing = [999.0 - 1000 / count * step for step in range(count)]
        for until in range(0, 1001, 25):
            by_time = sum(one < until for one in trailing)
            late = by_time if boundary_in(trailing, until) is None else late_in(trailing, until)
            share = min(math.floor(count * until / 1000 + 0.5), count - 1)
            assert late == max(by_time, share), (count, until)
    assert late_in([999, 749, 499, 249], 375) == 2, "of which one is before 375"
    assert boundary_in([999, *KARRAS[3:]], 375) is None, "so many late ones that the time leaves more than the share"
    longer = [999.0 - 1000 / (FEW + 1) * step for step in range(FEW + 1)]
    assert boundary_in(longer, 500) is None, "rounded so little that a boundary by time does"


def phase_of(config, now):
    return "early" if now.live[0].ratio == config.early_ratio else "late"


def phases_at(loop, told=None, **sampling):
    """The phase of each step of a loop of one's own. told: to `set_time`; sampling: to `sampling`."""
    model, seen = models.small(), []
    x, text = models.inputs(4, 1, 8, 8)
    patched = tome_core.patch(model, models.on_small("balanced"), host_clock=told is not None)
    with patched as handle, handle.sampling(**sampling), torch.no_grad():
        for timestep in loop:
            if told is not None:
                handle.set_time(timestep=timestep, sampling="one", timesteps=told)
            models.call_unet(model, x, timestep, text)
            seen.append(phase_of(handle.config, handle.time.now))
    return seen


EARLY_THEN_LATE = ["early"] * 6 + ["late"] * 4


def test_a_loop_of_ones_own_says_which_steps_it_has():
    assert phases_at(HALF, timesteps=HALF) == phases_at(HALF, told=HALF) == EARLY_THEN_LATE
    assert phases_at(HALF) == ["early"] * 3 + ["late"] * 7, "nobody said it: the boundary is a time"
    expected = ["early"] * 7 + ["late"] * 3
    assert phases_at(WHOLE) == phases_at(WHOLE, timesteps=WHOLE) == phases_at(WHOLE, told=WHOLE) == expected


def test_the_next_sampling_has_a_boundary_of_its_own():
    model = models.small()
    with tome_core.patch(model, models.on_small("balanced"), host_clock=True) as handle:
        for timesteps, phase in ((HALF, "early"), (WHOLE, "late"), (None, "late"), (HALF, "early")):
            handle.set_time(timestep=300.0, sampling=object(), timesteps=timesteps)
            assert phase_of(handle.config, handle.time.now) == phase
        handle.set_time()
        handle.set_time(timestep=300.0)
        assert phase_of(handle.config, handle.time.now) == "late"


@pytest.mark.parametrize("value", [0.05, 0.1, 0.25, 0.5, 0.75, 1.0])
def test_the_work_of_a_pass_is_the_promised_one(value):
    """To half of a step, whose early and late work differ by so much."""
    config = strength(value)
    clock = Clock(config, [1])
    late, early = 1 - config.rules[0].effective_ratio, 1 - (config.early_ratio or config.rules[0].effective_ratio)
    part = config.early_until / 1000
    promised = late * part + early * (1 - part)
    for steps in (HALF, HALF[::2], KARRAS):
        boundary = clock.boundary_in(steps)
        phases = [phase_of(config, clock.at(clock.moment(one), boundary)) for one in steps]
        work = sum(early if phase == "early" else late for phase in phases) / len(phases)
        assert abs(work - promised) <= (late - early) / len(steps) / 2 + 1e-9


def test_other_limits_in_time_hold_on():
    """Of rules: they are timesteps that somebody gave."""
    rule = tome_core.MergeRule(side="kv", ratio=0.5, min_timestep=150.0)
    config = tome_core.MergeConfig(rules=(rule,), early_ratio=0.75, early_until=300.0)
    clock = Clock(config, [1])
    boundary = clock.boundary_in(HALF)
    assert boundary == 175.0
    found = {one: clock.at(clock.moment(one), boundary) for one in HALF}
    assert [one for one in HALF if found[one].live] == [one for one in HALF if one >= 150]
    assert [one for one in HALF if one >= 150 and phase_of(config, found[one]) == "early"] == [
        one for one in HALF if one >= 175]  # fmt: skip


def test_steps_that_are_told_outweigh_a_schedulers():
    """Half of a picture is drawn here, and the other half was elsewhere."""
    scheduler = diffusers.DDIMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear")
    scheduler.set_timesteps(20)
    rest, model, seen = scheduler.timesteps[10:], models.small(), []
    x, text = models.inputs(4, 1, 8, 8)
    pipe = type("Pipeline", (), {"unet": model, "scheduler": scheduler})()
    with tome_core.patch(pipe, models.on_small("balanced")) as handle:
        for told in (None, scheduler.timesteps.tolist()):
            with handle.sampling(timesteps=told), torch.no_grad():
                for timestep in rest:
                    models.call_unet(model, x, timestep, text)
                    seen.append(phase_of(handle.config, handle.time.now))
    own, whole = seen[:10], seen[10:]
    assert own == EARLY_THEN_LATE and whole == ["early" if one >= 375 else "late" for one in rest]


@pytest.mark.parametrize("wrong", [[500.0, -1.0], [500.0, float("nan")]])
def test_steps_that_are_no_times_are_refused(wrong):
    with tome_core.patch(models.small(), "balanced") as handle:
        with pytest.raises(ValueError, match="timesteps="):
            handle.set_time(timestep=500.0, timesteps=wrong)
        with pytest.raises(ValueError, match="timesteps="), handle.sampling(timesteps=wrong):
            pass


def share_late(report):
    """Of the finest level's merged calls: late ones keep more keys."""
    (_, early), (_, late) = sorted((keys, calls) for (*_, keys), calls in report.levels[0].merged.items())
    return late / (early + late)


def drawn(pipe, **more):
    """The share of late calls in an image to image pass of 10 steps, of which half are left."""
    pipe.set_progress_bar_config(disable=True)
    picture = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    with tome_core.patch(pipe, models.on_small("balanced")) as handle:
        pipe("a b", image=picture, num_inference_steps=20, output_type="latent", **more)
        return share_late(handle.report())


@pytest.mark.parametrize("scheduler", [diffusers.DDIMScheduler, diffusers.EulerDiscreteScheduler,
                                       diffusers.HeunDiscreteScheduler])  # fmt: skip
def test_diffusers_image_to_image_finds_its_steps_by_itself(words, scheduler):
    pipe = tiny_pipeline.stable_diffusion(words)
    pipe.scheduler = scheduler.from_config(pipe.scheduler.config)
    halved = StableDiffusionImg2ImgPipeline(**pipe.components, requires_safety_checker=False)
    # of Heun's 19 calls, two a step but for the last, 6
    assert drawn(halved, strength=0.5) == pytest.approx(0.4 if scheduler.order == 1 else 6 / 19)


def test_a_refiner_of_diffusers_goes_on_with_the_picture(words):
    """It draws the late half of one whole picture, more of whose steps are late."""
    pipe = StableDiffusionXLImg2ImgPipeline(**tiny_pipeline.stable_diffusion_xl(words).components)
    picture = torch.rand(1, 4, 64, 64, generator=torch.Generator().manual_seed(0))
    size = {"original_size": (128, 128), "target_size": (128, 128)}
    with tome_core.patch(pipe, models.on_small("balanced")) as handle:
        for begun, late in (({"denoising_start": 0.5}, 0.6), ({"strength": 0.5}, 0.4)):
            pipe("a b", image=picture, num_inference_steps=10, output_type="latent", **begun, **size)
            assert share_late(handle.report()) == pytest.approx(late)
            handle.reset_counts()
