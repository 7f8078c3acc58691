"""Times: the three scales of one noise schedule, which rule holds when and where, and what a scheduler's step means."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
import torch
from diffusers import EulerDiscreteScheduler

from tome_core import MergeConfig, MergeRule, NoiseSchedule
from tome_core.engine.time import Clock
from tome_core.settings.schedule import STABLE_DIFFUSION, UNKNOWN, SchedulerNoise, Time

SD = STABLE_DIFFUSION


def test_the_schedule_is_that_of_diffusers_and_all_scales_agree():
    scheduler = EulerDiscreteScheduler(beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012)
    assert SD.betas == pytest.approx(scheduler.betas.tolist(), rel=1e-5)
    sigmas = (1 / scheduler.alphas_cumprod - 1).sqrt().tolist()
    for timestep in (0, 1, 250, 500, 998, 999):
        assert SD.timestep_of_sigma(sigmas[timestep]) == pytest.approx(timestep, abs=0.01)
        assert SD.timestep_of(SD.percent_of(timestep)) == pytest.approx(timestep)
    assert SD.timestep_of_sigma(1e9) == SD.timestep_of(0.0) == 999 and SD.timestep_of_sigma(0.0) == 0
    assert SD.timestep_of_beta(0.25 * SD.betas[400] + 0.75 * SD.betas[401]) == pytest.approx(400.75)


def test_a_beta_threshold_of_a_fifth_is_always_on_for_stable_diffusion():
    """The document that gives 0.2 says it is about 40 % of the steps; the betas end at 0.012."""
    assert SD.window_of(MergeConfig(max_beta=0.2)) == (0.0, 1.0)
    for last in range(1, 1000, 7):
        start, end = SD.window_of(MergeConfig(max_beta=SD.betas[last]))
        merging = [t for t in (0, last - 1, last, 999) if start <= SD.percent_of(t) <= end]
        assert merging == [0, last - 1]
    for never in (0.0, SD.betas[0]):
        assert SD.window_of(MergeConfig(max_beta=never))[0] > 1, "at no percent there is"


@pytest.mark.parametrize("settings, inside, outside", [
    ({"end_percent": 0.5}, Time(percent=0.5), [Time(percent=0.51)]),
    ({"start_percent": 0.2}, Time(percent=0.2), [Time(percent=0.19)]),
    ({"min_timestep": 300}, Time(timestep=300), [Time(timestep=299)]),
    ({"min_timestep": 300, "end_percent": 0.5}, Time(300, 0.5), [Time(300, 0.51), Time(299, 0.5)]),
])  # fmt: skip
def test_limits_hold_up_to_their_ends_and_not_where_the_time_is_unknown(settings, inside, outside):
    clock = Clock(MergeConfig(**settings), [1])
    assert clock.limited and clock.at(inside).live
    assert not any(clock.at(time).live for time in (*outside, UNKNOWN))


def test_percents_are_of_the_models_own_schedule_and_timesteps_stable_diffusions():
    """Noise of which Stable Diffusion has none counts as its last step, and is a part of the other's schedule."""
    noisier = NoiseSchedule(tuple(min(0.999, 3 * beta) for beta in SD.betas))
    clock = Clock(MergeConfig(start_percent=0.1), [1], noisier)
    merging = [percent for percent in (0.05, 0.099, 0.1, 0.15) if clock.at(clock.moment(None, percent)).live]
    assert merging == [0.1, 0.15] and clock.moment(None, 0.1).timestep == clock.moment(None, 0.05).timestep == 999


def test_the_first_rule_that_fits_wins_for_each_part_and_one_of_ratio_zero_keeps_its_times_unmerged():
    off, hard, gentle = MergeRule(ratio=0.0, min_timestep=800), MergeRule(min_timestep=500), MergeRule(ratio=0.25)
    mlp = MergeRule(merge_attn=False, merge_mlp=True, min_timestep=700)
    clock = Clock(MergeConfig(rules=(mlp, off, hard, gentle)), (1, 2))
    for timestep, *expected in ((900, None, mlp), (800, None, mlp), (799, hard, mlp), (500, hard, None),
                                (400, gentle, None)):  # fmt: skip
        rules = clock.at(Time(timestep=timestep)).rules[0]
        assert [rules.attn, rules.mlp, rules.crossattn] == [*expected, None]


def test_a_schedule_is_read_once_whatever_the_order_of_its_steps_and_again_once_it_is_written_into(monkeypatch):
    known, steps, other = SchedulerNoise(torch.nn.Module()), torch.arange(900, 100, -100), torch.arange(900, 0, -90)
    known.steps_of = Mock(side_effect=lambda values: [2 * value for value in values])
    meanings = known.look(steps[0])
    assert meanings == [2 * value for value in steps.tolist()] and known.look(other[9]) == [180]
    with monkeypatch.context() as context:
        for name in ("__float__", "tolist", "item"):
            context.setattr(torch.Tensor, name, lambda self: pytest.fail("a value was read, which waits for a device"))
        for number in (3, 1, 7, 0):
            assert known.look(steps[number]) == known.look(steps[number][None].expand(2)) == meanings[number:]
    steps.sub_(50)
    assert known.look(steps[7]) == [300] and known.steps_of.call_count == 3
    with torch.inference_mode():
        assert known.look(torch.tensor([9.0, 8.0])[1]) == [16.0]
