"""The time of a call and its rules: from a host, else a scheduler, else the argument; a schedule's three scales."""

import math
from unittest.mock import Mock

import diffusers
import pytest
import torch

import tome_core
from tests.small_models import sd_pipelines, unets
from tests.small_models.least_pipeline import Pipeline
from tests.small_models.least_unet import KEPT
from tests.watching.threads import at_once
from tome_core import MergeConfig, MergeRule
from tome_core.engine.scheduler_steps import SchedulerNoise
from tome_core.engine.time import FEW, WHOLE_FROM, Clock, ModelTime, boundary_in
from tome_core.settings.schedule import STABLE_DIFFUSION as SD
from tome_core.settings.schedule import UNKNOWN, Time

LATE = MergeConfig(ratio=0.5, start_percent=0.5)
BALANCED = unets.on_small("balanced")
LATENT = torch.zeros(1, 4, 8, 8)
SD_BETAS = {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012}


def test_the_schedule_is_that_of_diffusers_and_all_scales_agree():
    scheduler = diffusers.EulerDiscreteScheduler(**SD_BETAS)
    assert SD.betas == pytest.approx(scheduler.betas.tolist(), rel=1e-5)
    sigmas = (1 / scheduler.alphas_cumprod - 1).sqrt().tolist()
    for timestep in (0, 1, 250, 500, 998, 999):
        assert SD.timestep_of_sigma(sigmas[timestep]) == pytest.approx(timestep, abs=0.01)
        assert SD.timestep_of(SD.percent_of(timestep)) == pytest.approx(timestep)
    assert SD.timestep_of_sigma(1e9) == SD.timestep_of(0.0) == 999 and SD.timestep_of_sigma(0.0) == 0
    assert SD.timestep_of_beta(0.25 * SD.betas[400] + 0.75 * SD.betas[401]) == pytest.approx(400.75)


@pytest.mark.parametrize("settings, inside, outside", [
    ({"end_percent": 0.5}, Time(percent=0.5), [Time(percent=0.51)]),
    ({"start_percent": 0.2}, Time(percent=0.2), [Time(percent=0.19)]),
    ({"min_timestep": 300}, Time(timestep=300), [Time(timestep=299)]),
    ({"min_timestep": 300, "end_percent": 0.5}, Time(300, 0.5), [Time(300, 0.51), Time(299, 0.5)]),
    ({"max_beta": SD.betas[400]}, SD.time_of(399), [SD.time_of(400)]), ({"max_beta": 0.2}, SD.time_of(999), [])])
def test_limits_hold_up_to_their_ends_and_not_where_the_time_is_unknown(settings, inside, outside):
    clock = Clock(MergeConfig(**settings), [1])
    assert clock.limited and clock.at(inside).live
    assert not any(clock.at(time).live for time in (*outside, UNKNOWN))


def test_the_first_rule_that_fits_wins_for_each_part_and_one_of_ratio_zero_keeps_its_times_unmerged():
    off, hard, gentle = MergeRule(ratio=0.0, min_timestep=800), MergeRule(min_timestep=500), MergeRule(ratio=0.25)
    mlp = MergeRule(merge_attn=False, merge_mlp=True, min_timestep=700)
    clock = Clock(MergeConfig(rules=(mlp, off, hard, gentle)), (1, 2))
    for timestep, *expected in ((900, None, mlp), (800, None, mlp), (799, hard, mlp), (500, hard, None),
                                (400, gentle, None)):  # fmt: skip
        rules = clock.at(Time(timestep=timestep)).rules[0]
        assert [rules.attn, rules.mlp, rules.crossattn] == [*expected, None]


HALF = [500.0 - 50 * step for step in range(10)]
WHOLE = [999.0 - 100 * step for step in range(10)]
KARRAS = [470.0, 380.0, 295.0, 225.0, 165.0, 110.0, 65.0, 30.0, 8.0, 1.0]


def late_in(timesteps, until):
    boundary = boundary_in(timesteps, until)
    return sum(timestep < (until if boundary is None else boundary) for timestep in timesteps)


@pytest.mark.parametrize("begins", [999.0, WHOLE_FROM - 1, 500.0, 50.0])
def test_a_pass_has_its_share_of_late_steps_and_a_whole_picture_goes_by_time_unless_it_has_few(begins):
    """The share is that of a whole picture, to the nearest step."""
    for count in (1, 2, 3, 5, FEW, FEW + 1, 20):
        steps = [begins * (1 - step / count) for step in range(count)]
        for until in range(0, 1001, 25):
            expected = math.floor(count * until / 1000 + 0.5)
            if begins >= WHOLE_FROM:
                by_time = sum(timestep < until for timestep in steps)
                expected = by_time if count > FEW else max(by_time, min(expected, count - 1))
            assert late_in(steps, until) == late_in(steps[::-1], until) == expected, (count, until)
    assert late_in(KARRAS, 375) == 4, "however they are spread"
    assert boundary_in([], 375) is boundary_in([999, *KARRAS[3:]], 375) is None


@pytest.mark.parametrize("limit", [150.0, 300.0])
def test_a_passes_boundary_moves_the_early_phase_and_no_other_limit_in_time(limit):
    """Limits of rules are timesteps that the user chose."""
    rule = MergeRule(side="kv", ratio=0.5, min_timestep=limit)
    clock = Clock(MergeConfig(rules=(rule,), early_ratio=0.75, early_until=300.0), [1])
    boundary = clock.boundary_in(HALF)
    for timestep in HALF:
        live = clock.at(clock.moment(timestep), boundary).live
        assert bool(live) == (timestep >= limit) and (not live or (live[0].ratio == 0.75) == (timestep >= 175))


@pytest.fixture
def time():
    return ModelTime(Clock(BALANCED, [1]), keeps=False)


def early_in(time, timesteps) -> list[bool]:
    return [time.next_call(timestep, LATENT)[0].live[0].ratio == BALANCED.early_ratio for timestep in timesteps]


def test_a_host_says_which_steps_a_sampling_has_and_the_next_has_its_own(time):
    for timesteps, expected in ((HALF, [True]), (WHOLE, [False]), (None, [False]), (HALF, [True])):
        time.set(None, 300.0, None, object(), timesteps=timesteps)
        assert early_in(time, [900]) == expected
    time.set(None, None, None)
    time.set(None, 300.0, None)
    assert early_in(time, [900]) == [False]


def test_steps_that_are_told_outweigh_those_of_the_scheduler():
    pipe = Pipeline(diffusers.DDIMScheduler(**SD_BETAS))
    pipe.scheduler.set_timesteps(20)
    steps, time = pipe.scheduler.timesteps, tome_core.patch(pipe, BALANCED).time
    for known, expected in ((None, [True] * 6 + [False] * 4), (steps.tolist(), [step >= 375 for step in steps[10:]])):
        with time.sample(timesteps=known):
            assert early_in(time, steps[10:]) == expected


def test_a_refiner_which_draws_the_late_half_of_a_picture_has_the_steps_of_a_whole_one(words):
    refiner = diffusers.StableDiffusionXLImg2ImgPipeline(**sd_pipelines.stable_diffusion_xl(words).components)
    refiner.set_progress_bar_config(disable=True)
    sizes = {"original_size": (128, 128), "target_size": (128, 128)}
    for begins, share in (({"denoising_start": 0.5}, 0.6), ({"strength": 0.5}, 0.4)):
        with tome_core.patch(refiner, BALANCED) as handle:
            call = {"image": torch.zeros(1, 4, 64, 64), "num_inference_steps": 10, "output_type": "latent"}
            refiner("a b", **call, **sizes, **begins)
        kinds = handle.report().levels[0].merged.items()
        (_, early), (_, late) = sorted((keys, calls) for (*_, keys), calls in kinds)  # late ones keep more keys
        assert late / (early + late) == pytest.approx(share)


def merges(time, timestep, batch: int = 1) -> bool:
    return bool(time.next_call(timestep, LATENT.repeat(batch, 1, 1, 1))[0].live)


def test_a_host_outweighs_the_argument():
    time = ModelTime(Clock(LATE, [1]), keeps=False)
    assert merges(time, 100) and not merges(time, 900)
    for percent, timestep, sigma in ((None, 100, None), (0.9, None, None), (None, None, 0.1)):
        time.set(percent, timestep, sigma)
        assert merges(time, 900)
        time.set(None, None, None)
        assert not merges(time, 900)


def test_a_timestep_that_is_no_element_of_a_schedule_is_read():
    """Several timesteps at once are no time, nor is a tensor without a value."""
    time = ModelTime(Clock(MergeConfig(min_timestep=500), [1]), keeps=False)
    time.scheduler_steps = SchedulerNoise(unets.small())
    for timestep in (600, torch.tensor(600), torch.full((2,), 600.0), torch.arange(10_000)[600]):
        assert merges(time, timestep, 2)
    for timestep in (123, torch.full((2,), 123), torch.tensor([600, 601]), torch.tensor(600, device="meta"), None):
        assert not merges(time, timestep, 2)


@torch.no_grad()
def test_pictures_of_two_threads_keep_apart():
    time = ModelTime(Clock(KEPT, [1]), keeps=True)

    @torch.no_grad()
    def draw():
        with time.sample():
            return time.next_call(500, LATENT)[1].plans

    with time.sample():
        kept = time.next_call(500, LATENT)[1].plans
        (other,) = at_once(draw)
        assert other is not kept and time.next_call(490, LATENT)[1].plans is kept


def own_sigmas(scheduler) -> list[float]:
    """The noise of each step, as the scheduler itself uses it, relative to the picture."""
    if scheduler.config.get("use_flow_sigmas"):
        return [sigma / max(1 - sigma, 1e-6) for sigma in scheduler.sigmas.tolist()[: len(scheduler.timesteps)]]
    if hasattr(scheduler, "sigmas"):
        of_data = scheduler.config.get("sigma_data", 1.0)
        return [sigma / of_data for sigma in scheduler.sigmas.tolist()[: len(scheduler.timesteps)]]
    kept = scheduler.alphas_cumprod[scheduler.timesteps.long()].double()
    return ((1 - kept) / kept).sqrt().tolist()


CONTINUOUS = {"timestep_type": "continuous", "prediction_type": "v_prediction", **SD_BETAS}
FLOW = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0}
AT_500, HALF_WAY = {"min_timestep": 500}, {"end_percent": 0.5}


@torch.no_grad()
@pytest.mark.parametrize("name, changes, limit",
                         [("DDIM", SD_BETAS, AT_500), ("EulerDiscrete", {}, AT_500),
                          ("DPMSolverMultistep", {"use_karras_sigmas": True, **SD_BETAS}, AT_500),
                          ("UniPCMultistep", FLOW, AT_500), ("EulerDiscrete", CONTINUOUS, HALF_WAY),
                          ("EDMEuler", {"sigma_data": 0.5, "sigma_max": 20.0}, HALF_WAY)])  # fmt: skip
def test_a_rule_means_the_same_noise_with_every_scheduler(name, changes, limit):
    """Matches age by the same noise. Pipelines pass an element of the timesteps, or a copy elsewhere in memory."""
    pipe = Pipeline(getattr(diffusers, f"{name}Scheduler")(**changes))
    pipe.scheduler.set_timesteps(8)
    before = sorted(vars(pipe.scheduler))
    expected = [SD.timestep_of_sigma(sigma) for sigma in own_sigmas(pipe.scheduler)]
    assert 0 < sum(time >= 500 for time in expected) < len(expected)
    with tome_core.patch(pipe, side="kv", ratio=0.5, keep=100.0, **limit) as handle:
        for hand_over in (lambda timestep: timestep, torch.clone):
            with handle.sampling():
                for timestep, time in zip(pipe.scheduler.timesteps, expected, strict=True):
                    now, kept = handle.time.next_call(hand_over(timestep), LATENT)
                    assert bool(now.live) == (time >= 500) and kept.timestep == pytest.approx(time, abs=1.5)
        assert sorted(vars(pipe.scheduler)) == before, "nothing is put on a scheduler"


def test_a_pipelines_rule_in_percent_merges_in_exactly_its_steps_whatever_scheduler_comes(pipe):
    with tome_core.patch(pipe, LATE) as handle:
        for kind in (diffusers.HeunDiscreteScheduler, diffusers.PNDMScheduler):  # programs set it after the patch
            pipe.scheduler = kind.from_config(pipe.scheduler.config)
            handle.reset_counts()
            pipe("a", num_inference_steps=8, guidance_scale=2.0, output_type="latent")
            level, steps = handle.report().levels[0], pipe.scheduler.timesteps
            late = sum(1 - float(timestep) / 999 >= 0.5 for timestep in steps)
            assert 0 < late < handle.report().calls == len(steps) and level.calls_merged == late * level.blocks
            why = "attn: these steps stay whole, by start and end"
            assert level.reasons == {why: (len(steps) - late) * level.blocks}


def test_a_schedule_is_read_once_whatever_the_order_of_its_steps_and_again_once_it_is_written_into(monkeypatch):
    known, steps = SchedulerNoise(torch.nn.Module()), torch.arange(900, 100, -100)
    known.steps_of = Mock(side_effect=lambda values: [2 * value for value in values])
    meanings = known.steps_by_memory(steps[0])
    assert meanings == [2 * value for value in steps.tolist()]
    assert known.steps_by_memory(torch.arange(900, 0, -90)[9]) == [180]
    with monkeypatch.context() as context:
        for name in ("__float__", "tolist", "item"):
            context.setattr(torch.Tensor, name, lambda self: pytest.fail("a value was read, which waits for a device"))
        for number in (3, 1, 7, 0):
            assert (
                known.steps_by_memory(steps[number])
                == known.steps_by_memory(steps[number][None].expand(2))
                == meanings[number:]
            )
    steps.sub_(50)
    assert known.steps_by_memory(steps[7]) == [300] and known.steps_of.call_count == 3
    with torch.inference_mode():
        assert known.steps_by_memory(torch.tensor([9.0, 8.0])[1]) == [16.0]
