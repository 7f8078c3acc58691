"""One number from 0, which is off, to 1: whatever lies between asks more of every step, and nothing jumps."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

import tome_core
from benchmarks.strength import step_time
from tests import tiny_transformers
from tests.models import BY_NAME, call_case, on_small, sdxl, small
from tome_core import preset, strength
from tome_core.settings.config import plain_rules, reaches
from tome_core.settings.presets import LAYOUTS, MARKS, SD, SDXL, TRANSFORMER

FINELY = [number / 200 for number in range(201)]
of_each = pytest.mark.parametrize("layout", LAYOUTS)
DOWNSAMPLES = (1, 2, 4)


def kept(config: tome_core.MergeConfig, timestep: float, level: int = 0) -> float:
    """Share of the keys that a step keeps at a level."""
    if config.is_off:
        return 1.0
    for one in plain_rules(config, DOWNSAMPLES):
        if one.merge_attn and timestep >= (one.min_timestep or 0.0) and reaches(one, level, DOWNSAMPLES[level]):
            return 1 - one.effective_ratio
    return 1.0


def test_what_is_no_layout_or_preset_is_refused_with_those_that_are():
    with pytest.raises(ValueError, match="layout='flux' is not known; use one of 'sd', 'sdxl', 'transformer'"):
        strength(0.5, layout="flux")
    with pytest.raises(ValueError, match=r"preset='best'.*'balanced'"):
        tome_core.patch(small(), "best")


def test_nothing_is_off_bit_for_bit():
    model, case = small(), BY_NAME["sd15"]
    assert strength(0).is_off and strength(0.0).is_off and not strength(1e-6).is_off
    plain = call_case(case, model)
    with tome_core.patch(model, strength=0):
        assert torch.equal(call_case(case, model), plain)
    with tome_core.patch(model, on_small("max")):
        assert not torch.equal(call_case(case, model), plain)


@of_each
@pytest.mark.parametrize("timestep", [0.0, 50.0, 125.0, 300.0, 500.0, 750.0, 999.0])
def test_more_strength_asks_more_of_every_step(timestep, layout):
    shares = [kept(strength(one, layout=layout), timestep) for one in FINELY]
    assert shares[0] == 1.0 and shares[-1] == pytest.approx(1 / 64)
    assert all(stronger <= weaker for weaker, stronger in pairwise(shares))


@of_each
def test_nothing_jumps(layout):
    """A step of a hundredth changes the time of the finest attention, over the noise schedule, by a few per cent."""
    moments = range(0, 1000, 5)
    steps = [[kept(strength(one, layout=layout), moment) for moment in moments] for one in FINELY[::2]]
    time = [sum(map(step_time, shares)) / len(moments) for shares in steps]
    assert time[1] > 0.9, "the first hundredth changes hardly anything"
    for weaker, stronger in pairwise(time):
        assert stronger <= weaker < 1.1 * stronger


@of_each
def test_no_step_merges_so_little_that_it_would_take_longer(layout):
    shares = {kept(strength(one, layout=layout), moment) for one in FINELY for moment in (0, 300, 999)}
    assert all(step_time(share) < 1 for share in shares - {1.0}) and step_time(1.0) == 1


def test_marks_are_strengths():
    assert tuple(MARKS) == tome_core.PRESETS == ("quality", "balanced", "fast", "max")
    for layout in LAYOUTS:
        assert all(preset(name, layout) == strength(value, layout=layout) for name, value in MARKS.items())


MODELS = {SD: small, SDXL: sdxl, TRANSFORMER: lambda: tiny_transformers.make("Flux")[0]}


@of_each
def test_a_model_gets_the_strengths_of_its_layout(layout):
    model = MODELS[layout]()
    for wanted in ("balanced", "quality"):
        with tome_core.patch(model, wanted) as by_name, tome_core.patch(model, strength=MARKS[wanted]) as by_number:
            own = preset(wanted, layout)
            assert by_name.config == by_number.config == own
            assert (own == preset(wanted)) == (layout == SD)
    with tome_core.patch(model) as unsaid, tome_core.patch(model, "fast", seed=5) as changed:
        assert unsaid.config == preset("balanced", layout)
        assert changed.config == replace(preset("fast", layout), seed=5)


@pytest.mark.parametrize("wrong", [-0.1, 1.01, float("nan"), float("inf"), True, None, "0.5"])
def test_what_is_no_strength_is_refused_with_the_range(wrong):
    with pytest.raises(ValueError, match="0 to 1"):
        strength(wrong)


def test_a_strength_and_settings_at_once_are_refused():
    with pytest.raises(ValueError, match="give one of them"):
        tome_core.patch(small(), "fast", strength=0.5)
