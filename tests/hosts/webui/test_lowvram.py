"""A1111 started with the flags that move the model between memories while it runs."""

from __future__ import annotations

import pytest

from tests.hosts.webui.running import ASKED, HALF, SAVED, kind_of
from tests.hosts.webui.twins import serve_twins


@pytest.fixture(scope="module", params=["--lowvram", "--medvram"])
def low(request, checkout, checkpoints, tmp_path_factory):
    """The twins, started so."""
    if kind_of(checkout) != "a1111":
        pytest.skip("the Forges move models by a memory manager of their own, whatever the flags")
    with serve_twins(checkout, checkpoints, tmp_path_factory.mktemp("low"), request.param) as running:
        yield running


def test_moving_the_model_in_parts(low):
    assert SAVED in low.law(HALF)
    assert f"hires pass: 2 steps, {SAVED}" in low.law(HALF, hires=True)
    assert SAVED in low.law(HALF, n_iter=2)


def test_another_checkpoint_for_the_hires_pass(low, other):
    line = low.law(HALF, hires=True, hr_checkpoint_name=other)
    assert line == f"{ASKED}; first pass: 3 steps, {SAVED}; hires pass: 2 steps, {SAVED}"
    assert SAVED in low.law(HALF, override_settings={"sd_model_checkpoint": other})
