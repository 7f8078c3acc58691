"""The time of a call: from a host, else a pipeline's scheduler, else the argument; never waited for without need."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import diffusers
import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounter

import tome_core
from tests.models import BY_NAME
from tests.samplings import KEPT
from tests.threads import at_once
from tome_core.engine.time import Clock, ModelTime
from tome_core.settings.schedule import STABLE_DIFFUSION, SchedulerNoise

STEPS = 8
LATE = tome_core.MergeConfig(ratio=0.5, start_percent=0.5)


def draw(pipe, steps: int = STEPS):
    generator = torch.Generator().manual_seed(0)
    return pipe("a", num_inference_steps=steps, guidance_scale=2.0, generator=generator, output_type="latent").images


def expected_merges(scheduler, config=LATE) -> int:
    """UNet calls at a share of the schedule inside the rule's range, from the scheduler's own timesteps."""
    last = scheduler.config.num_train_timesteps - 1
    return sum(config.start_percent <= 1 - float(t) / last <= config.end_percent for t in scheduler.timesteps)


@pytest.mark.parametrize("name", ["DDIM", "EulerDiscrete", "DPMSolverMultistep", "UniPCMultistep", "LCM",
                                  "HeunDiscrete", "PNDM"])  # fmt: skip
def test_a_rule_in_percent_merges_in_exactly_its_steps(pipe, name):
    pipe.scheduler = getattr(diffusers, f"{name}Scheduler").from_config(pipe.scheduler.config)
    with tome_core.patch(pipe, LATE) as handle:
        draw(pipe)
        level = handle.report().levels[0]
    merges, steps = expected_merges(pipe.scheduler), len(pipe.scheduler.timesteps)
    assert 0 < merges < handle.report().calls == steps and level.calls_merged == merges * level.blocks
    assert level.reasons == {"attn: outside the rules' time range": (steps - merges) * level.blocks}


def stable_diffusions_timestep(sigma: float) -> float:
    """Where Stable Diffusion's own schedule has noise of this deviation, relative to data of unit variance."""
    betas = np.linspace(0.00085**0.5, 0.012**0.5, 1000) ** 2
    kept = np.cumprod(1 - betas)
    return float(np.interp(np.log(sigma), np.log(((1 - kept) / kept) ** 0.5), np.arange(1000)))


def own_sigmas(scheduler) -> list[float]:
    """Of each step, as the scheduler itself goes on with it."""
    if isinstance(scheduler, diffusers.IPNDMScheduler):
        return torch.tan(scheduler.timesteps.double() * torch.pi / 2).tolist()
    if hasattr(scheduler, "sigmas"):
        of_data = scheduler.config.get("sigma_data", 1.0)
        return [sigma / of_data for sigma in scheduler.sigmas.tolist()[: len(scheduler.timesteps)]]
    kept = scheduler.alphas_cumprod[scheduler.timesteps.long()].double()
    return ((1 - kept) / kept).sqrt().tolist()


CONTINUOUS = {"timestep_type": "continuous", "prediction_type": "v_prediction"}
OF_OTHER_TIMES = [  # no timestep is one of Stable Diffusion's
    ("EulerDiscrete", {**CONTINUOUS, "beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012}),
    ("IPNDM", {}), ("EDMEuler", {"sigma_data": 0.5, "sigma_max": 20.0}),
    ("EDMDPMSolverMultistep", {"sigma_max": 20.0}),
]  # fmt: skip
TIMES = [
    ("DDIM", {}), ("PNDM", {"skip_prk_steps": True}), ("LCM", {}), ("HeunDiscrete", {}),
    ("EulerDiscrete", {"beta_schedule": "scaled_linear"}), ("EulerDiscrete", CONTINUOUS),
    ("DPMSolverMultistep", {"use_karras_sigmas": True}),
    ("DPMSolverMultistep", {"beta_schedule": "squaredcos_cap_v2"}), *OF_OTHER_TIMES,
]  # fmt: skip


@pytest.mark.parametrize("name, changes, limit", [
    *((*one, {"min_timestep": 500}) for one in TIMES), *((*one, {"end_percent": 0.5}) for one in OF_OTHER_TIMES),
], ids=str)  # fmt: skip
def test_a_rule_means_the_same_noise_with_every_scheduler(pipe, name, changes, limit):
    """In percent, too, where a scheduler's timesteps are none of a schedule that is known."""
    pipe.scheduler = getattr(diffusers, f"{name}Scheduler").from_config({**pipe.scheduler.config, **changes})
    with tome_core.patch(pipe, ratio=0.5, **limit) as handle:
        draw(pipe)
    times = [stable_diffusions_timestep(sigma) for sigma in own_sigmas(pipe.scheduler)]
    merges = sum(time >= 500 for time in times)
    assert 0 < merges < handle.report().calls == len(times)
    assert handle.report().levels[0].calls_merged == merges * 3


class Doubled(SchedulerNoise):
    """Means twice what it counts; asked: how often a schedule was read."""

    asked = 0

    def __init__(self):
        super().__init__(torch.nn.Module())

    def steps_of(self, values):
        self.asked += 1
        return [2 * value for value in values]


def test_a_timestep_is_looked_up_without_reading_it(pipe, monkeypatch):
    pipe.scheduler.set_timesteps(STEPS)
    steps, known = pipe.scheduler.timesteps, Doubled()
    meanings = known.look(steps[0])
    assert meanings == [2 * one for one in steps.tolist()]
    monkeypatch.setattr(torch.Tensor, "__float__", lambda self: pytest.fail("the timestep's value was read"))
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: pytest.fail("the timesteps were read again"))
    assert [known.look(t) for t in steps] == [meanings[number:] for number in range(STEPS)]
    assert [known.look(t[None].expand(2))[0] for t in steps[3:]] == meanings[3:]


def test_a_timestep_of_somebodys_own_making_is_read(pipe):
    known = Doubled()
    for one in (torch.tensor(123), torch.full((2,), 123), torch.arange(10_000)[123], 123, torch.tensor(1.0).to("meta")):
        assert known.look(one) == [] and not known.asked
    x, text = torch.randn(2, 4, 16, 16), torch.randn(2, 7, 32)
    made = (600, 123, torch.tensor(600), torch.full((2,), 123), torch.full((2,), 600.0), torch.arange(10_000)[600])
    with torch.no_grad(), tome_core.patch(pipe, tome_core.MergeConfig(min_timestep=500)) as handle:
        merged = []
        for one in made:
            handle.reset_counts()
            pipe.unet(x, one, text)
            merged.append(handle.report().levels[0].calls_merged == 3)
    assert merged == [True, False, True, False, True, True]


def test_a_step_that_is_given_by_its_value_means_what_the_schedulers_own_does(pipe):
    """Pipelines hand over copies, which lie elsewhere. EDM counts in logarithms, which are below 500 all of them."""
    pipe.scheduler = diffusers.EDMEulerScheduler.from_config(pipe.scheduler.config)
    pipe.scheduler.set_timesteps(STEPS)
    x, text = torch.randn(1, 4, 16, 16), torch.randn(1, 7, 32)
    with torch.no_grad(), tome_core.patch(pipe, tome_core.MergeConfig(min_timestep=500)) as handle:
        found = []
        for views in (True, False):
            for step in pipe.scheduler.timesteps:
                handle.reset_counts()
                pipe.unet(x, step if views else step.clone(), text)
                found.append(handle.report().levels[0].calls_merged)
    assert found[:STEPS] == found[STEPS:] and {0, 3} == set(found)


def test_a_schedule_is_asked_once_whatever_the_order_of_its_steps():
    """In what order, and whether for another picture, is nothing that a schedule tells."""
    known = Doubled()
    steps, others = torch.arange(1000, 0, -100), torch.arange(900, 0, -90)
    for count, order in ((1, [*steps[:4], steps[3], *steps[5:], *steps[:2]]), (2, others)):
        assert [known.look(one)[0] for one in order] == [2 * one.item() for one in order]
        assert known.asked == count


def test_a_schedule_that_is_written_into_is_asked_again():
    known, steps = Doubled(), torch.tensor([500.0, 510.0, 400.0])
    assert [known.look(one)[0] for one in steps] == [1000.0, 1020.0, 800.0]
    steps.mul_(0.5)
    assert known.look(steps[2]) == [400.0]
    with torch.inference_mode():
        assert known.look(torch.tensor([9.0, 8.0])[1]) == [16.0]


def test_a_host_outweighs_the_argument():
    time, latent = ModelTime(Clock(LATE, [1]), keeps=False), torch.zeros(1, 4, 8, 8)

    def merges(argument):
        return bool(time.next_call(argument, latent)[0].live)

    assert merges(100) and not merges(900)
    for given in ({"timestep": 100}, {"percent": 0.9}, {"sigma": 0.1}):
        time.set(**{"percent": None, "timestep": None, "sigma": None, **given})
        assert merges(900), given
        time.set(None, None, None)
        assert not merges(900)


def test_several_timesteps_at_once_are_no_time():
    time, latent = ModelTime(Clock(LATE, [1]), keeps=False), torch.zeros(2, 4, 8, 8)
    assert time.next_call(torch.tensor([100, 100]), latent)[0].live
    assert not time.next_call(torch.tensor([100, 101]), latent)[0].live


def test_pictures_of_two_threads_keep_apart():
    time, latent = ModelTime(Clock(KEPT, [1]), keeps=True), torch.zeros(1, 4, 8, 8)

    @torch.no_grad()
    def kept():
        found = time.next_call(500, latent)[1]
        return found and dict(found.plans)

    def draw():
        with time.sample():
            return kept()

    with torch.no_grad(), time.sample():
        time.next_call(500, latent)[1].plans["x"] = 1
        assert kept() == {"x": 1}
        assert at_once(kept, draw) == [None, {}]
        assert kept() == {"x": 1}


def test_a_scheduler_exchanged_after_patching_does_not_stop_the_clock(pipe):
    with tome_core.patch(pipe, LATE) as handle:
        draw(pipe)
        first = handle.report().levels[0].calls_merged
        pipe.scheduler = diffusers.EulerDiscreteScheduler.from_config(pipe.scheduler.config)
        draw(pipe)
        assert handle.report().levels[0].calls_merged - first == expected_merges(pipe.scheduler) * 3


@pytest.mark.slow
def test_a_pipeline_compiled_as_a_whole_follows_its_scheduler(pipe):
    plain, counter = draw(pipe), CompileCounter()
    torch._dynamo.reset()
    with tome_core.patch(pipe, LATE):
        expected = draw(pipe)
        pipe.unet = torch.compile(pipe.unet, backend=counter, fullgraph=True)
        assert torch.equal(draw(pipe), expected)
        assert torch.equal(draw(pipe), expected)
        assert counter.frame_count == 1, "one graph, merged and not"
    assert not torch.equal(plain, expected)


@pytest.mark.parametrize("turn", [1, -1])
def test_nothing_is_left_on_a_scheduler_even_if_two_pipelines_share_it(pipe, turn):
    other = copy.deepcopy(pipe)
    other.scheduler = pipe.scheduler
    before = dict(vars(pipe.scheduler))
    handles = [tome_core.patch(one, LATE) for one in (pipe, other)]
    assert vars(pipe.scheduler) == before
    for handle in handles[::turn]:
        handle.remove()
    assert vars(pipe.scheduler) == before


def test_an_ldm_model_knows_its_own_schedule():
    model = BY_NAME["ldm_wrapped"].build()
    model.betas = torch.tensor(STABLE_DIFFUSION.betas)
    with tome_core.patch(model, LATE) as handle:
        assert handle.knows_schedule


def test_anything_with_a_unet_and_a_scheduler_is_a_pipeline(pipe):
    model = SimpleNamespace(unet=pipe.unet, scheduler=pipe.scheduler)
    x, text = torch.randn(1, 4, 16, 16), torch.randn(1, 7, 32)
    pipe.scheduler.set_timesteps(STEPS)
    with torch.no_grad(), tome_core.patch(model, LATE) as handle:
        for timestep in pipe.scheduler.timesteps:
            pipe.unet(pipe.scheduler.scale_model_input(x, timestep), timestep, text)
    assert handle.report().levels[0].calls_merged == expected_merges(pipe.scheduler) * 3
