"""The steps of a sampling: which time a call has, and how long the calls between the first and last report took."""

import pytest
import torch

from tests.watching import step_clock
from tome_core.engine.steps import Steps


def test_a_call_has_the_time_of_its_step_as_long_as_the_steps_are_reported_in_order():
    steps = Steps()
    assert steps.time is None, "no times are known"
    steps.begin([14.6, 2.0, 0.5])
    seen = [steps.time]
    for step in range(3):
        steps.count_step(step)
        seen.append(steps.time)
    assert seen == [14.6, 2.0, 0.5, 0.5] and steps.follows
    steps.count_step(1)
    assert steps.time is None and steps.done == 4


@pytest.mark.parametrize("wrong", [1, True, 0.0, None])
def test_a_first_step_that_is_not_0_is_counted_but_not_followed(wrong):
    steps = Steps()
    steps.begin([1.0, 0.5])
    steps.count_step(wrong)
    assert not steps.follows and steps.done == 1


def test_the_first_step_is_not_timed_and_calls_are_told_by_kind(monkeypatch):
    step_clock.put_on(monkeypatch, step=2.0)
    steps, latent, heard = Steps(), torch.zeros(2, 4, 8, 8), []
    callback = steps.counting_callback(lambda *args: heard.append(args), number_in=lambda given: given["i"])
    for step in range(4):
        between = max(0, step - 1)
        assert steps.timed == (2.0 * between, 2 * between)
        steps.call(latent, "a patch")
        steps.call()
        callback({"i": step}, "more")
    assert steps.timed == (6.0, 6) and steps.calls == 8 and callback.steps is steps and len(heard) == 4
    assert steps.kinds == {((2, 4, 8, 8), torch.float32, latent.device, "a patch")}
