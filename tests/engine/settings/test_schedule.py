"""Times: the three scales of one noise schedule, and which rule holds when and where."""

from __future__ import annotations

import pytest
from diffusers import EulerDiscreteScheduler

from tome_core import MergeConfig, MergeRule, NoiseSchedule
from tome_core.engine.time import Clock
from tome_core.settings.schedule import STABLE_DIFFUSION, UNKNOWN, Time, choose

SD = STABLE_DIFFUSION


def test_percent_and_timestep_are_each_others_inverse():
    for percent in (0.0, 0.25, 0.5, 0.9, 1.0):
        assert SD.percent_of(SD.timestep_of(percent)) == pytest.approx(percent)
    assert SD.timestep_of(0.0) == 999 and SD.timestep_of(1.0) == 0


def test_betas_are_those_of_diffusers_and_sigma_and_timestep_agree_with_k_diffusion():
    scheduler = EulerDiscreteScheduler(beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012)
    assert SD.betas == pytest.approx(scheduler.betas.tolist(), rel=1e-5)
    sigmas = (1 / scheduler.alphas_cumprod - 1).sqrt().tolist()
    for timestep in (0, 1, 250, 500, 998, 999):
        assert SD.timestep_of_sigma(sigmas[timestep]) == pytest.approx(timestep, abs=0.01)
    assert SD.timestep_of_sigma(1e9) == 999 and SD.timestep_of_sigma(0.0) == 0


def test_a_beta_threshold_of_a_fifth_is_always_on_for_stable_diffusion():
    """The document that gives 0.2 says it is about 40 % of the steps; the betas end at 0.012."""
    assert SD.window_of(MergeConfig(max_beta=0.2)) == (0.0, 1.0)
    for last in range(1, 1000, 7):
        start, end = SD.window_of(MergeConfig(max_beta=SD.betas[last]))
        merging = [t for t in (0, last - 1, last, 999) if start <= SD.percent_of(t) <= end]
        assert merging == [0, last - 1]
    for never in (0.0, SD.betas[0]):
        assert SD.window_of(MergeConfig(max_beta=never))[0] > 1, "at no percent there is"


def test_a_beta_between_two_timesteps_is_reached_between_them():
    beta = 0.25 * SD.betas[400] + 0.75 * SD.betas[401]
    assert SD.timestep_of_beta(beta) == pytest.approx(400.75) and SD.timestep_of_beta(SD.betas[-1]) == 999


@pytest.mark.parametrize(("settings", "inside", "outside"), [
    ({"end_percent": 0.5}, Time(percent=0.5), Time(percent=0.51)),
    ({"start_percent": 0.2}, Time(percent=0.2), Time(percent=0.19)),
    ({"min_timestep": 300}, Time(timestep=300), Time(timestep=299)),
    ({"min_timestep": 300, "end_percent": 0.5}, Time(300, 0.5), Time(300, 0.51)),
    ({"min_timestep": 300, "end_percent": 0.5}, Time(300, 0.5), Time(299, 0.5)),
])  # fmt: skip
def test_limits_hold_up_to_their_ends_and_not_where_the_time_is_unknown(settings, inside, outside):
    clock = Clock(MergeConfig(**settings), [1])
    assert clock.limited and clock.at(inside).live
    assert not clock.at(outside).live and not clock.at(UNKNOWN).live


def test_percents_are_of_the_models_own_schedule_and_timesteps_stable_diffusions():
    """Noise of which Stable Diffusion has none counts as its last step, and is a part of the other's schedule."""
    noisier = NoiseSchedule(tuple(min(0.999, 3 * beta) for beta in SD.betas))
    clock = Clock(MergeConfig(start_percent=0.1), [1], noisier)
    merging = [percent for percent in (0.05, 0.099, 0.1, 0.15) if clock.at(clock.moment(None, percent)).live]
    assert merging == [0.1, 0.15] and clock.moment(None, 0.1).timestep == clock.moment(None, 0.05).timestep == 999


def test_the_first_rule_that_fits_wins_and_one_of_ratio_zero_keeps_its_times_unmerged():
    off, hard, gentle = MergeRule(ratio=0.0, min_timestep=800), MergeRule(min_timestep=500), MergeRule(ratio=0.25)
    clock = Clock(MergeConfig(rules=(off, hard, gentle)), (1, 2))
    for timestep, expected in ((900, None), (800, None), (799, hard), (500, hard), (400, gentle)):
        assert clock.at(Time(timestep=timestep)).rules[0].attn is expected


def test_each_part_of_a_block_has_its_own_first_rule():
    early, always = MergeRule(merge_attn=False, merge_mlp=True, min_timestep=700), MergeRule(ratio=0.5)
    rules = choose((early, always), (1,))[0]
    assert rules.attn is always and rules.mlp is early and rules.crossattn is None


@pytest.mark.parametrize(("rule", "downsamples", "reached"), [
    (MergeRule(), (1, 2, 4), [0]), (MergeRule(), (2, 4), [0]),
    (MergeRule(max_downsample=1), (1, 2, 4), [0]), (MergeRule(max_downsample=1), (2, 4), []),
    (MergeRule(max_downsample=2), (2, 4), [0]), (MergeRule(max_downsample=8), (1, 2, 4), [0, 1, 2]),
])  # fmt: skip
def test_levels_count_what_has_attention_and_max_downsample_counts_from_the_latent(rule, downsamples, reached):
    chosen = choose((rule,), downsamples)
    assert [level for level, rules in enumerate(chosen) if rules.attn is rule] == reached
