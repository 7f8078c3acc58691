"""Times: the three scales of one noise schedule, and which rule holds when and where."""

from __future__ import annotations

import pytest

from tome_core import MergeRule, NoiseSchedule
from tome_core.schedule import Time, choose, holds_at, live_at

SD = NoiseSchedule.stable_diffusion()


def test_percent_and_timestep_are_each_others_inverse():
    for percent in (0.0, 0.25, 0.5, 0.9, 1.0):
        assert SD.percent_of(SD.timestep_of(percent)) == pytest.approx(percent)
    assert SD.timestep_of(0.0) == 999 and SD.timestep_of(1.0) == 0


@pytest.mark.parametrize("scheduler", ["DDIMScheduler", "EulerDiscreteScheduler", "DPMSolverMultistepScheduler"])
def test_betas_are_those_of_diffusers(scheduler):
    import diffusers

    made = getattr(diffusers, scheduler)(beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012)
    assert SD.betas == pytest.approx(made.betas.tolist(), rel=1e-5)


def test_sigma_and_timestep_agree_with_k_diffusion():
    from diffusers import EulerDiscreteScheduler

    scheduler = EulerDiscreteScheduler(beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012)
    sigmas = (1 / scheduler.alphas_cumprod - 1).sqrt().tolist()
    for timestep in (0, 1, 250, 500, 998, 999):
        assert SD.timestep_of_sigma(sigmas[timestep]) == pytest.approx(timestep, abs=0.01)
    assert SD.timestep_of_sigma(1e9) == 999 and SD.timestep_of_sigma(0.0) == 0


def test_a_beta_threshold_of_a_fifth_is_always_on_for_stable_diffusion():
    """The document that gives 0.2 says it is about 40 % of the steps; the betas end at 0.012."""
    rule = MergeRule(max_beta=0.2)
    assert all(holds_at(rule, Time(timestep=t, beta=SD.beta_of(t))) for t in range(1000))
    middle = MergeRule(max_beta=SD.beta_of(400))
    assert [holds_at(middle, Time(beta=SD.beta_of(t))) for t in (0, 399, 400, 999)] == [True, True, False, False]


@pytest.mark.parametrize(
    ("rule", "inside", "outside"),
    [
        (MergeRule(end_percent=0.5), Time(percent=0.5), Time(percent=0.51)),
        (MergeRule(start_percent=0.2), Time(percent=0.2), Time(percent=0.19)),
        (MergeRule(min_timestep=300), Time(timestep=300), Time(timestep=299)),
        (MergeRule(max_timestep=300), Time(timestep=300), Time(timestep=301)),
        (MergeRule(max_beta=0.005), Time(beta=0.0049), Time(beta=0.005)),
    ],
)
def test_limits_hold_up_to_their_ends_and_not_where_the_time_is_unknown(rule, inside, outside):
    assert holds_at(rule, inside)
    assert not holds_at(rule, outside)
    assert not holds_at(rule, Time())


def test_the_first_rule_that_fits_wins():
    hard, gentle = MergeRule(ratio=0.75, end_percent=0.5), MergeRule(ratio=0.25)
    for percent, expected in ((0.1, hard), (0.5, hard), (0.6, gentle)):
        assert choose(live_at((hard, gentle), Time(percent=percent)), (1, 2))[0].attn is expected


def test_a_rule_of_ratio_zero_keeps_its_times_unmerged():
    off, on = MergeRule(ratio=0.0, start_percent=0.8), MergeRule(ratio=0.5)
    assert choose(live_at((off, on), Time(percent=0.9)), (1,))[0].attn is None
    assert choose(live_at((off, on), Time(percent=0.5)), (1,))[0].attn is on


def test_each_part_of_a_block_has_its_own_first_rule():
    early = MergeRule(merge_attn=False, merge_mlp=True, end_percent=0.3)
    always = MergeRule(ratio=0.5)
    rules = choose(live_at((early, always), Time(percent=0.1)), (1,))[0]
    assert rules.attn is always and rules.mlp is early and rules.crossattn is None


@pytest.mark.parametrize(
    ("rule", "downsamples", "reached"),
    [
        (MergeRule(), (1, 2, 4), [0]),
        (MergeRule(), (2, 4), [0]),
        (MergeRule(levels=(1,)), (2, 4), [1]),
        (MergeRule(max_downsample=1), (1, 2, 4), [0]),
        (MergeRule(max_downsample=1), (2, 4), []),
        (MergeRule(max_downsample=2), (2, 4), [0]),
        (MergeRule(max_downsample=8), (1, 2, 4), [0, 1, 2]),
    ],
)
def test_levels_count_what_has_attention_and_max_downsample_counts_from_the_latent(rule, downsamples, reached):
    chosen = choose((rule,), downsamples)
    assert [level for level, rules in enumerate(chosen) if rules.attn is rule] == reached


def test_a_rule_for_large_pictures_leaves_small_and_unknown_ones_to_the_next():
    large, any_size = MergeRule(ratio=0.75, min_pixels=1024 * 1024), MergeRule(ratio=0.25)
    for pixels, expected in ((1024 * 1024, large), (1024 * 1024 - 1, any_size), (None, any_size)):
        assert choose((large, any_size), (1,), pixels)[0].attn is expected
