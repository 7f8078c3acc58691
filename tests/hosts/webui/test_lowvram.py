"""A1111 started with the flags that move the model between memories while it runs."""

from __future__ import annotations

import pytest

from tests.hosts.webui.running import kind_of
from tests.hosts.webui.twins import serve_twins

ON = (True, 0.5)


@pytest.fixture(scope="module", params=["--lowvram", "--medvram"])
def low(request, checkout, checkpoints, tmp_path_factory):
    """The twins, started so."""
    if kind_of(checkout) != "a1111":
        pytest.skip("the Forges move models by a memory manager of their own, whatever the flags")
    with serve_twins(checkout, checkpoints, tmp_path_factory.mktemp("low"), request.param) as running:
        yield running


def test_moving_the_model_in_parts(low):
    assert "256 -> 128 tokens" in low.law(*ON)
    assert "hires pass: level 0 (/1) 576 -> 288" in low.law(*ON, hires=True)
    assert "256 -> 128 tokens" in low.law(*ON, n_iter=2)


def test_another_checkpoint_for_the_hires_pass(low, other):
    line = low.law(*ON, hires=True, hr_checkpoint_name=other)
    assert "256 -> 128" in line and "576 -> 288" in line
    assert "256 -> 128 tokens" in low.law(*ON, override_settings={"sd_model_checkpoint": other})
