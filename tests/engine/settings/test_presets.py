"""Strength from 0, which is off, to 1: a larger strength merges more in every step, and nothing jumps."""

from dataclasses import replace
from itertools import pairwise

import pytest

import tome_core
from benchmarks.strength import step_time
from tests.small_models import dits
from tests.small_models.unets import sdxl, small
from tome_core import MergeConfig, preset, strength
from tome_core.patching import patch_on
from tome_core.settings.presets import CURVE_NAMES, CURVES, MARKS, SD, SDXL, TRANSFORMER
from tome_core.settings.rules import plain_rules

MOMENTS = range(0, 1000, 25)
of_each = pytest.mark.parametrize("curve", CURVE_NAMES)
of_each_unet = pytest.mark.parametrize("curve", CURVES)


def shares(config: MergeConfig) -> list[float]:
    """The share of the finest level's keys that is kept at each moment."""
    rules = [] if config.is_off else plain_rules(config, [1])
    return [1 - next((rule.effective_ratio for rule in rules if rule.holds_at(moment)), 0.0) for moment in MOMENTS]


@of_each_unet
def test_more_strength_asks_more_of_every_step_and_nothing_jumps(curve):
    """A hundredth changes the time of attention by a few percent. No step merges so little that it takes longer."""
    kept = [shares(strength(number / 100, curve=curve)) for number in range(101)]
    times = [sum(map(step_time, curve)) / len(MOMENTS) for curve in kept]
    most = {SD: [1 / 64] * len(MOMENTS), SDXL: kept[40]}[curve]
    assert set(kept[0]) == {1.0} and kept[-1] == pytest.approx(most), "SDXL's gain is whole blocks from there on"
    assert times[1] > 0.9, "the first hundredth changes hardly anything"
    for weaker, stronger in pairwise(kept):
        assert all(more <= less for less, more in zip(weaker, stronger, strict=True))
    assert all(longer < 1.1 * shorter for longer, shorter in pairwise(times))
    assert all(step_time(share) < 1 for curve in kept for share in curve if share < 1) and step_time(1.0) == 1


def test_marks_are_strengths_and_nothing_is_off():
    assert strength(0).is_off and strength(0.0).is_off and not strength(1e-6).is_off
    assert tuple(MARKS) == tome_core.PRESETS == ("quality", "balanced", "fast", "max")
    for curve in CURVE_NAMES:
        assert all(preset(name, curve) == strength(value, curve=curve) for name, value in MARKS.items())


@of_each_unet
def test_few_keys_are_means_of_wide_cells_that_k_means_refines(curve):
    cells = {name: (rule.sx, rule.sy, rule.refine) for name in MARKS for rule in preset(name, curve).rules[:1]}
    few = {"max": (8, 8, 3)} if curve == SD else {}
    assert cells == {**dict.fromkeys(MARKS, (4, 4, 0)), **few}, "as measured"


def test_more_strength_leaves_fewer_tokens_to_sdxls_coarsest_blocks_in_all_but_the_first_steps():
    rules = [strength(number / 100, curve=SDXL).rules[1:] for number in range(1, 101)]
    first = next(number for number, rule in enumerate(rules) if rule)
    assert 0 < first < 12 and rules[first][0].ratio == pytest.approx(0.25, abs=0.02), "less does not pay"
    for (weaker,), (stronger,) in pairwise(rules[first:]):
        assert weaker.ratio < stronger.ratio <= stronger.ratio_cap
        assert 1 - stronger.ratio > 0.95 * (1 - weaker.ratio)
        assert weaker.max_timestep <= stronger.max_timestep < 999, "the first step is whole"
    assert len(strength(0.5, curve=SD).rules) == 1


def tokens_at(value: float) -> list[float]:
    """The share of tokens that whole blocks of a transformer keep at each moment."""
    rules = strength(value, curve=TRANSFORMER).rules
    assert all(rule.merge_blocks and not rule.merge_attn and rule.ratio == rule.ratio_cap for rule in rules)
    return [1 - next((rule.ratio for rule in rules if rule.holds_at(moment)), 0.0) for moment in MOMENTS]


def test_transformers_merge_whole_blocks_in_noisy_steps_and_more_with_more_strength_and_never_in_late_steps():
    kept = [tokens_at(number / 100) for number in range(1, 101)]
    for shares in kept:
        assert shares == sorted(shares, reverse=True), "a noisier step keeps no more"
        assert all(share == 1 for share, moment in zip(shares, MOMENTS, strict=True) if moment < 650)
    for weaker, stronger in pairwise(kept):
        assert all(more <= less for less, more in zip(weaker, stronger, strict=True))
        assert sum(weaker) - sum(stronger) <= 1, "nothing jumps"
    most = [strength(number / 100, curve=TRANSFORMER).rules[0].most_steps for number in range(1, 101)]
    assert most == sorted(most) and most[49] == 4 and most[-1] == 8
    assert min(kept[0]) == 1 and min(kept[49]) == 1 / 2 and min(kept[-1]) == 1 / 4


MODELS = {SD: small, SDXL: sdxl, TRANSFORMER: lambda: dits.make("Flux")[0]}


@of_each
def test_a_model_gets_the_strengths_of_its_curve_and_flat_settings_change_them(curve):
    model = MODELS[curve]()
    balanced, fast = preset("balanced", curve), preset("fast", curve)
    assert (balanced == preset("balanced")) == (curve == SD)
    for given, settings, expected in (
        ((), {}, balanced), (("fast",), {"seed": 5}, replace(fast, seed=5)),
        ((), {"strength": 0.3, "end_percent": 0.5}, replace(strength(0.3, curve=curve), end_percent=0.5)),
        ((), {"ratio": 0.25, "early_ratio": 0.5}, MergeConfig(ratio=0.25, early_ratio=0.5)),
        ((MergeConfig(ratio=0.25),), {"sx": 4}, MergeConfig(ratio=0.25, sx=4))):  # fmt: skip
        assert tome_core.patch(model, *given, **settings).config == expected
    config = patch_on(tome_core.apply_patch(model)).config
    assert config == MergeConfig(proportional=False), "tomesd's way in is tomesd's way"


@pytest.mark.parametrize("given, settings, error, words", [
    *[((), {"strength": wrong}, ValueError, "0 to 1") for wrong in (-0.1, 1.01, float("nan"), True)],
    (("best",), {}, ValueError, r"preset='best'.*'balanced'"),
    (("fast",), {"strength": 0.5}, ValueError, "give one of them"),
    (({"ratio": 0.5},), {}, TypeError, "config is dict; it has to be a MergeConfig")])  # fmt: skip
def test_what_is_no_strength_and_no_preset_is_refused_with_those_that_are(given, settings, error, words):
    with pytest.raises(error, match=words):
        tome_core.patch(small(), *given, **settings)
