"""The seam between adapters and engine: what an adapter passes for a call, what it gets, and what is reported."""

import math
from typing import Any

import pytest
import torch

from tests.small_models.sequences import FILM, PICTURE, attention, sdpa
from tome_core import MergeConfig, MergeRule
from tome_core.engine.state import State
from tome_core.hosting import state_of
from tome_core.merging.grid import Grid, Layout
from tome_core.reporting.ledger import NOT_NOW, OTHER_PARTS, LevelTally

STRONG = MergeConfig(side="kv", ratio=0.9375, sx=4, sy=4, metric="keys+values", use_rand=False, refine=1)


def attend(config, inputs, layout=PICTURE, timestep=500):
    state = state_of(config, 2)
    call = state.begin(timestep, inputs.q[:, layout.first :, :1, :1].transpose(1, 3))
    return state.attend(call, "a", 0, layout, inputs), state.report()


@pytest.mark.parametrize("layout", [PICTURE, FILM])
def test_what_it_gives_is_near_and_counted(layout):
    inputs = attention(layout, behind=2)
    out, report = attend(STRONG, inputs, layout)
    exact = sdpa(*inputs[:3])
    assert 0 < (out - exact).norm() < 0.2 * exact.norm()
    (level,) = report.levels
    assert (level.downsample, level.channels) == (2, inputs.q.shape[2] * inputs.q.shape[3])
    ((before, queries, keys),) = level.tokens
    assert before == queries == inputs.q.shape[1] and keys < before / 8


@pytest.mark.parametrize("config, layout, keys, why", [
    (STRONG, Layout(PICTURE.grid, 1000), None, "attn: the tokens are not those of the whole picture"),
    (STRONG, PICTURE, -4, "attn: the tokens are not those of the whole picture"),
    (MergeConfig(side="kv", ratio=0.25), Layout(Grid(1, 2)), None, "attn: the picture is too small"),
    (MergeConfig(merge_attn=False, merge_mlp=True), PICTURE, None, "attn: its rule merges other parts")])  # fmt: skip
def test_what_does_not_fit_is_left_alone_and_said(config, layout, keys, why):
    inputs = attention(PICTURE, behind=4)
    out, report = attend(config, inputs._replace(k=inputs.k[:, :keys], v=inputs.v[:, :keys]), layout)
    assert out is None and [reason[: len(why)] for reason in report.reasons] == [why]


def test_maps_are_of_the_picture_alone_and_of_a_film_its_first_frame():
    state, inputs = state_of(STRONG, 2), attention(FILM, behind=3)
    state.keep_maps()
    state.attend(state.begin(500, inputs.q), "a", 0, FILM, inputs)
    assert [(*merge_map.grid[:2], *merge_map.group.shape) for merge_map in state.maps().values()] == [(8, 12, 2, 96)]
    state.reset_counts()
    assert not state.maps() and not state.report().calls


PERCENT, TIME = "no time; use a number from 0 to 1", "no time; use a number from 0 up"


@pytest.mark.parametrize("name, wrong, error, why", [
    ("percent", 1.0001, ValueError, PERCENT), ("timestep", -0.1, ValueError, TIME),
    ("sigma", math.inf, ValueError, TIME), ("timesteps", [500.0, -1.0], ValueError, TIME),
    ("pictures", 0, ValueError, "no number of pictures"), ("percent", "0.5", TypeError, "str; use a number"),
    ("timestep", torch.tensor(0.5), TypeError, "Tensor; use a number")])  # fmt: skip
def test_what_is_no_time_and_no_pass_is_refused_with_its_range_or_its_type(name, wrong, error, why):
    state, words = state_of(MergeConfig(), 1), f"^{name}=.* is {why}"
    with pytest.raises(error, match=words):
        state.set_time(**{name: wrong})
    if name in ("timesteps", "pictures"):
        with pytest.raises(error, match=words), state.sampling(**{name: wrong}):
            pass


def test_a_rule_for_the_first_steps_of_a_sampling_counts_its_timesteps_and_begins_anew_with_the_next():
    blocks = MergeRule(ratio=0.75, merge_attn=False, merge_blocks=True, most_steps=2)

    def begun(state: State, timestep: float, sampling: Any) -> Any:
        state.set_time(timestep=timestep, sampling=sampling)
        with torch.no_grad():
            return state.begin(timestep, torch.zeros(2, 4, 32, 32))

    def parts(timestep: float, sampling: Any) -> tuple[str, ...]:
        call = begun(both, timestep, sampling)
        assert call.why_not("block", 0) == OTHER_PARTS
        return tuple(part for part, rule in call.rules[0]._asdict().items() if rule)

    both, alone = (State(MergeConfig(rules=rules), [LevelTally(1, 1)])
                   for rules in ((blocks, MergeRule(ratio=0.5)), (blocks,)))  # fmt: skip
    assert [parts(timestep, "a") for timestep in (900, 900, 700, 500, 300)] == [("attn", "block")] * 3 + [("attn",)] * 2
    assert parts(200, "b") == ("attn", "block"), "another sampling"
    assert parts(100, None) == ("attn", "block"), "without a sampling there are no steps to count"
    whys = [begun(alone, timestep, "a").why_not("attn", 0) for timestep in (900, 800, 700)]
    assert whys == [OTHER_PARTS, OTHER_PARTS, NOT_NOW], "when nothing merges any more, that is by the settings"
