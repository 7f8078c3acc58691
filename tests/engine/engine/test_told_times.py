"""A number that is no time is refused with its range, and what is no number with its type."""

from __future__ import annotations

import math
from decimal import Decimal

import pytest
import torch

import tome_core
from tests.models import unet


@pytest.fixture(scope="module")
def handle():
    return tome_core.patch(unet(attention_head_dim=1), tome_core.MergeConfig(end_percent=0.5))


NO_TIMES = [
    ("percent", 5), ("percent", 1.0001), ("percent", -0.1), ("timestep", -1), ("sigma", -0.5), ("percent", 10**400),
    *((name, value) for name in ("percent", "timestep", "sigma") for value in (math.nan, math.inf, -math.inf)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), NO_TIMES, ids=str)
def test_a_number_that_is_no_time_is_named_with_its_range(handle, name, value):
    handle.set_time(percent=0.25, timestep=500, sigma=1.5)
    with pytest.raises(ValueError, match=rf"^{name}=.* is no time; use a number from 0 ") as caught:
        handle.set_time(**{name: value})
    assert f"{name}={value!r}" in str(caught.value)
    assert str(caught.value).endswith("to 1" if name == "percent" else "up")


@pytest.mark.parametrize("value", ["0.5", "", b"1", True, [0.5], (0.5,), Decimal(1), 1j, torch.tensor(0.5)], ids=repr)
@pytest.mark.parametrize("name", ["percent", "timestep", "sigma"])
def test_what_is_no_number_is_no_time(handle, name, value):
    with pytest.raises(TypeError, match=rf"^{name}=.*{type(value).__name__}; use a number$"):
        handle.set_time(**{name: value})


@pytest.mark.parametrize("times", [
    {}, {"percent": 0}, {"percent": 1.0}, {"timestep": 0}, {"timestep": 999.5}, {"timestep": 10_000}, {"sigma": 0.0},
    {"sigma": 1e-30}, {"sigma": 700}, {"percent": 0.5, "timestep": 500, "sigma": 1.5, "sampling": "a picture"},
], ids=str)  # fmt: skip
def test_times_up_to_their_ends_are_taken(handle, times):
    handle.set_time(**times)
    assert handle.time._is_given == bool(times)
