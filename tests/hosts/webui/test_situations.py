"""In a real webui, one law for every way in which it can call its model: off is the webui without us, on says so."""

from __future__ import annotations

import pytest

from tests.hosts.webui.running import ASKED, HALF, SAVED

TILED = "HyperTile is on, whose tiles need every token"
GUIDANCE = {
    "cond and uncond in two calls": {"override_settings": {"batch_cond_uncond": False}},
    "texts of unequal length": {"negative_prompt": "a boat on the shore, " * 20},
    "two prompts at once, several batches": {"prompt": "a lake AND a tree :0.5", "batch_size": 2, "n_iter": 2},
    "uncond left out of every second step": {"s_min_uncond": 20, "steps": 4},
    "uncond left out of the early steps": {"override_settings": {"skip_early_cond": 0.6}},
    "no uncond": {"cfg_scale": 1},
}


@pytest.mark.parametrize("job", GUIDANCE.values(), ids=GUIDANCE)
def test_however_the_conditions_come(twins, job):
    assert SAVED in twins.law(HALF, **job)


def test_a_hypernetwork(twins):
    if twins.webui.kind == "forge":
        pytest.skip("Forge has no hypernetworks")
    job = {"prompt": "a lake <hypernet:small:1>"}
    assert twins.without.draw_once(**job).pixels != twins.without.draw_once().pixels
    assert SAVED in twins.law(HALF, **job)


@pytest.fixture
def with_hypertile(twins):
    """The twins, and after the test no trace of HyperTile in the next picture."""
    if twins.webui.kind != "a1111":
        pytest.skip("HyperTile is a setting of A1111 alone")
    yield twins
    assert "nothing merged" not in twins.law(HALF)
    twins.webui.draw(HALF)
    routes = {route for level in twins.webui.state()["routes"].values() for route in level}
    assert routes and all(route.startswith("bias") for route in routes), "its wrappers, which stay, are seen through"


def test_hypertile_in_the_hires_pass_alone_leaves_the_first_passes_before_it_to_us(with_hypertile):
    job = {"hires": True, "override_settings": {"hypertile_enable_unet_secondpass": True}}
    line = with_hypertile.law(HALF, **job)
    assert line.startswith(f"{ASKED}; first pass: 3 steps, {SAVED}; hires pass: nothing merged: HyperTile is on")
    line = with_hypertile.law(HALF, **job, n_iter=2)  # it stays on from the first hires pass to the job's end
    assert f"; first pass: 3 of 6 steps, {SAVED}; " in line and line.endswith(f"; first pass: {TILED}"), line


def test_hypertile_in_both_passes_leaves_us_nothing(with_hypertile):
    job = {"override_settings": {"hypertile_enable_unet": True}}
    assert with_hypertile.law(HALF, **job, merges=False) == f"{ASKED}, nothing merged: {TILED}"
