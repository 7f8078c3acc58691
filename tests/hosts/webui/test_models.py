"""Every kind of model in a real webui: SDXL (small: A1111 alone), another checkpoint, a refiner, one moved in parts."""

import pytest

from tests.hosts.webui.make_checkpoint import make_sdxl
from tests.hosts.webui.running import ASKED, HALF, SAVED, TWICE, kind_of, serve_twins


@pytest.fixture
def a1111(checkout):
    if kind_of(checkout) != "a1111":
        pytest.skip("needs A1111")
    return checkout


def test_sdxl_merges_from_half_the_latents_size_on(a1111, tmp_path):
    make_sdxl(tmp_path / "first.safetensors", a1111)
    size = {"width": 256, "height": 256, "steps": 2}
    with serve_twins(a1111, tmp_path, tmp_path / "webui") as twins:
        assert "; hires pass: 2 steps, " in twins.law(HALF, hires=True, **size)
        assert twins.webui.draw(HALF, **size).merged == [(2, 256, 128, 128)]
        assert twins.law(True, 0.5, **TWICE, steps=2).endswith("% less work")
        assert "nothing merged: " in twins.law(True, 0.5, **size, merges=False)
        large = twins.webui.draw(True, 0.5, width=1024, height=1024, steps=2)
        assert (4, 1024, 201, 201) in large.merged, "whole blocks, in the second step"


def test_a_model_that_is_moved_in_parts_merges(a1111, checkpoints, tmp_path):
    with serve_twins(a1111, checkpoints, tmp_path, "--lowvram") as twins:
        assert SAVED in twins.law(HALF, n_iter=2)
        assert twins.law(HALF, hires=True, hr_checkpoint_name="other") \
            == f"{ASKED}; first pass: 3 steps, {SAVED}; hires pass: 2 steps, {SAVED}"  # fmt: skip


def test_the_refiners_model_merges_too(twins):
    job = {"refiner_checkpoint": "second", "refiner_switch_at": 0.5, "steps": 4}
    assert "Refiner" in twins.without.draw_once(**job).infotext
    assert twins.law(HALF, **job) == f"{ASKED}, 4 steps, {SAVED}"


def test_another_checkpoint_merges_and_then_the_first_one_again(twins):
    assert SAVED in twins.law(HALF, override_settings={"sd_model_checkpoint": "other"})
    assert SAVED in twins.law(HALF)
