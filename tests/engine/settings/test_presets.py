"""One number from 0, which is off, to 1: whatever lies between asks more of every step, and nothing jumps."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

import tome_core
from benchmarks.strength import step_time
from tests import tiny_transformers
from tests.models import BY_NAME, call_case, sdxl, small
from tome_core import MergeConfig, preset, strength
from tome_core.patching import handle_on
from tome_core.settings.config import plain_rules, reaches
from tome_core.settings.presets import LAYOUTS, MARKS, SD, SDXL, TRANSFORMER

FINELY = [number / 200 for number in range(201)]
of_each = pytest.mark.parametrize("layout", LAYOUTS)
DOWNSAMPLES = (1, 2, 4)


def kept(config: MergeConfig, timestep: float, level: int = 0) -> float:
    """Share of the keys that a step keeps at a level."""
    if config.is_off:
        return 1.0
    for rule in plain_rules(config, DOWNSAMPLES):
        if rule.merge_attn and timestep >= (rule.min_timestep or 0.0) and reaches(rule, level, DOWNSAMPLES[level]):
            return 1 - rule.effective_ratio
    return 1.0


@of_each
def test_more_strength_asks_more_of_every_step_and_no_step_merges_so_little_that_it_would_take_longer(layout):
    for timestep in (0.0, 50.0, 125.0, 300.0, 500.0, 750.0, 999.0):
        shares = [kept(strength(value, layout=layout), timestep) for value in FINELY]
        assert shares[0] == 1.0 and shares[-1] == pytest.approx(1 / 64)
        assert all(stronger <= weaker for weaker, stronger in pairwise(shares))
        assert all(step_time(share) < 1 for share in set(shares) - {1.0}) and step_time(1.0) == 1


@of_each
def test_nothing_jumps(layout):
    """A step of a hundredth changes the time of the finest attention, over the noise schedule, by a few per cent."""
    moments = range(0, 1000, 5)
    steps = [[kept(strength(value, layout=layout), moment) for moment in moments] for value in FINELY[::2]]
    time = [sum(map(step_time, shares)) / len(moments) for shares in steps]
    assert time[1] > 0.9, "the first hundredth changes hardly anything"
    for weaker, stronger in pairwise(time):
        assert stronger <= weaker < 1.1 * stronger


def test_marks_are_strengths_and_nothing_is_off():
    assert strength(0).is_off and strength(0.0).is_off and not strength(1e-6).is_off
    assert tuple(MARKS) == tome_core.PRESETS == ("quality", "balanced", "fast", "max")
    for layout in LAYOUTS:
        assert all(preset(name, layout) == strength(value, layout=layout) for name, value in MARKS.items())


MODELS = {SD: small, SDXL: sdxl, TRANSFORMER: lambda: tiny_transformers.make("Flux")[0]}


@of_each
def test_a_model_gets_the_strengths_of_its_layout_and_flat_settings_change_them(layout):
    model = MODELS[layout]()
    own = {name: preset(name, layout) for name in ("balanced", "fast")}
    assert (own["balanced"] == preset("balanced")) == (layout == SD)
    changed = replace(strength(0.3, layout=layout), end_percent=0.5)
    for given, settings, expected in (
        ((), {}, own["balanced"]), (("fast",), {}, own["fast"]), ((), {"strength": MARKS["fast"]}, own["fast"]),
        (("fast",), {"seed": 5}, replace(own["fast"], seed=5)), ((), {"strength": 0.3, "end_percent": 0.5}, changed),
        ((), {"ratio": 0.25, "early_ratio": 0.5}, MergeConfig(ratio=0.25, early_ratio=0.5)),
        ((MergeConfig(ratio=0.25),), {"sx": 4}, MergeConfig(ratio=0.25, sx=4)),
    ):  # fmt: skip
        assert tome_core.patch(model, *given, **settings).config == expected
    config = handle_on(tome_core.apply_patch(model)).config
    assert config == MergeConfig(proportional=False), "tomesd's way in is tomesd's way"


def test_what_is_no_strength_layout_or_preset_is_refused_with_those_that_are():
    for wrong in (-0.1, 1.01, float("nan"), float("inf"), True, None, "0.5"):
        with pytest.raises(ValueError, match="0 to 1"):
            strength(wrong)
    with pytest.raises(ValueError, match="layout='flux' is not known; use one of 'sd', 'sdxl', 'transformer'"):
        strength(0.5, layout="flux")
    model = small()
    with pytest.raises(ValueError, match=r"preset='best'.*'balanced'"):
        tome_core.patch(model, "best")
    with pytest.raises(ValueError, match="give one of them"):
        tome_core.patch(model, "fast", strength=0.5)
    with pytest.raises(TypeError, match=r"unknown setting rato; there are: .*ratio.*early_until"):
        tome_core.patch(model, rato=0.5)
    with pytest.raises(TypeError, match="config is dict; it has to be a MergeConfig"):
        tome_core.patch(model, {"ratio": 0.5})


def test_presets_leave_few_tokens_alone_and_merge_many():
    case, model = BY_NAME["sd15"], small()
    with tome_core.patch(model, "balanced") as handle:
        call_case(case, model, height=16, width=16)
        assert not handle.report().merged_anything and "would not pay" in str(handle.report())
        call_case(case, model, height=32, width=32)
        assert handle.report().merged_anything
