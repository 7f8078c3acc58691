"""In a real webui, whichever model runs and wherever it lies: SDXL, another checkpoint, a refiner, moved in parts.

The Forges know SDXL in its own size alone, and move models by a memory manager of their own, whatever the flags.
"""

from __future__ import annotations

import pytest

from tests.hosts.webui.make_checkpoint import make_sdxl
from tests.hosts.webui.running import ASKED, HALF, SAVED, TWICE, kind_of, serve_twins
from tests.webui_doubles import custom

REFINER = {"refiner_checkpoint": "second", "refiner_switch_at": 0.5, "steps": 4}
SIZE = {"width": 256, "height": 256, "steps": 2}
SAVED_IN_SDXL = "75% of attention left out"  # by half of the tokens: it has no other level


@pytest.fixture
def a1111(checkout):
    if kind_of(checkout) != "a1111":
        pytest.skip("needs A1111")
    return checkout


def test_sdxl_merges_from_half_the_latents_size_on(a1111, tmp_path):
    make_sdxl(tmp_path / "first.safetensors")
    with serve_twins(a1111, tmp_path, tmp_path / "webui") as twins:
        assert twins.law(HALF, **SIZE) == f"{ASKED}, 2 steps, {SAVED_IN_SDXL}"
        assert twins.webui.draw(HALF, **SIZE).merged() == [(2, 256, 128, 128)]
        line = twins.law({**HALF, "where": "hires pass"}, hires=True, **SIZE)
        assert line == f"{ASKED}; first pass: left alone; hires pass: 2 steps, {SAVED_IN_SDXL}"
        assert twins.law(True, 0.5, **TWICE, steps=2).endswith(" of attention left out")
        assert "nothing merged: " in twins.law(True, 0.5, **SIZE, merges=False)
        line = twins.law(custom(level="up to /1"), **SIZE, merges=False)
        assert line.startswith(f"{ASKED}, nothing merged: ") and "/2" in line


@pytest.mark.parametrize("flag", ["--lowvram", "--medvram"])
def test_a_model_that_is_moved_in_parts_merges(a1111, checkpoints, other, tmp_path, flag):
    with serve_twins(a1111, checkpoints, tmp_path, flag) as twins:
        assert SAVED in twins.law(HALF, n_iter=2)
        line = twins.law(HALF, hires=True, hr_checkpoint_name=other)
        assert line == f"{ASKED}; first pass: 3 steps, {SAVED}; hires pass: 2 steps, {SAVED}"
        assert SAVED in twins.law(HALF, override_settings={"sd_model_checkpoint": other})


def test_the_refiners_model_merges_too(twins, without):
    assert "Refiner" in without.draw_once(**REFINER).infotext
    assert twins.law(HALF, **REFINER) == f"{ASKED}, 4 steps, {SAVED}"


def test_another_checkpoint_is_loaded_into_the_same_modules(twins, other):
    start = len(twins.webui.log_text())
    assert SAVED in twins.law(HALF, override_settings={"sd_model_checkpoint": other})
    if twins.webui.kind == "a1111":
        assert "Reusing loaded model" in twins.webui.log_text(start)
    assert SAVED in twins.law(HALF)


def test_a_checkpoint_of_its_own_for_the_hires_pass(twins, without, other):
    job = {"hires": True, "hr_checkpoint_name": other}
    assert without.draw_once(**job).pixels != without.draw_once(hires=True).pixels
    first, second = f"first pass: 3 steps, {SAVED}", f"hires pass: 2 steps, {SAVED}"
    for where, passes in {
        "everywhere": [first, second], "first pass": [first, "hires pass: left alone"],
        "hires pass": ["first pass: left alone", second],
    }.items():  # fmt: skip
        assert twins.law({**HALF, "where": where}, **job) == "; ".join([ASKED, *passes])
