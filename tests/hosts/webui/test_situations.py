"""In a real webui, one law for every way in which it can call its model: off is the webui without us, on says so."""

from __future__ import annotations

import pytest

from tests.hosts.webui.running import ASKED, HALF, SAVED

GUIDANCE = {
    "cond and uncond in two calls": {"override_settings": {"batch_cond_uncond": False}},
    "texts of unequal length": {"negative_prompt": "a boat on the shore, " * 20},
    "two prompts at once": {"prompt": "a lake AND a tree :0.5", "batch_size": 2},
    "uncond left out of every second step": {"s_min_uncond": 20, "steps": 4},
    "uncond left out of the early steps": {"override_settings": {"skip_early_cond": 0.6}},
    "no uncond": {"cfg_scale": 1},
    "several batches": {"n_iter": 2, "batch_size": 2},
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


def test_hypertile_in_the_hires_pass_alone_leaves_the_first_pass_to_us(twins):
    _needs_hypertile(twins)
    job = {"hires": True, "override_settings": {"hypertile_enable_unet_secondpass": True}}
    line = twins.law(HALF, **job)
    assert line.startswith(f"{ASKED}; first pass: 3 steps, {SAVED}; hires pass: nothing merged: HyperTile is on")
    assert "nothing merged" not in twins.law(HALF)


def test_hypertile_that_stays_on_after_the_first_hires_pass_has_the_later_pictures_to_itself(twins):
    _needs_hypertile(twins)
    job = {"hires": True, "n_iter": 2, "override_settings": {"hypertile_enable_unet_secondpass": True}}
    line = twins.law(HALF, **job)
    assert f"; first pass: 3 of 6 steps, {SAVED}; " in line, line
    assert line.endswith("; first pass: HyperTile is on, whose tiles need every token"), line
    assert "nothing merged" not in twins.law(HALF)


def test_hypertile_in_both_passes_leaves_us_nothing(twins):
    _needs_hypertile(twins)
    job = {"override_settings": {"hypertile_enable_unet": True}}
    assert twins.law(HALF, **job, merges=False) == (
        f"{ASKED}, nothing merged: HyperTile is on, whose tiles need every token")
    assert SAVED in twins.law(HALF)
    twins.webui.draw(HALF)
    ways = {way for level in twins.webui.state()["routes"].values() for way in level}
    assert ways and all(one.startswith("bias") for one in ways), "its wrappers, which stay for good, are seen through"


def _needs_hypertile(twins):
    if twins.webui.kind != "a1111":
        pytest.skip("HyperTile is a setting of A1111 alone")


def test_another_checkpoint_is_loaded_into_the_same_modules(twins, other):
    start = len(twins.webui.said())
    assert SAVED in twins.law(HALF, override_settings={"sd_model_checkpoint": other})
    if twins.webui.kind == "a1111":
        assert "Reusing loaded model" in twins.webui.said(start)
    assert SAVED in twins.law(HALF)


@pytest.mark.parametrize("where", ["everywhere", "first pass", "hires pass"])
def test_a_checkpoint_of_its_own_for_the_hires_pass(twins, other, where):
    plain = twins.without.draw_once(hires=True)
    job = {"hires": True, "hr_checkpoint_name": other}
    assert twins.without.draw_once(**job).pixels != plain.pixels
    asked, first, second = twins.law({**HALF, "where": where}, **job).split("; ")
    assert asked == ASKED and first == "first pass: " + ("left alone" if where == "hires pass" else f"3 steps, {SAVED}")
    assert second == "hires pass: " + ("left alone" if where == "first pass" else f"2 steps, {SAVED}")
