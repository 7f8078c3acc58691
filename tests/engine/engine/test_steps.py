"""The steps of a sampling: which time a call has. How long they took is a law of the hosts' and of test_pictures.py."""

import pytest

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
