"""A real webui over its HTTP API: what is bit-identical, what is not, and what it says."""

from __future__ import annotations

import re
import threading
import time
import urllib.error

import pytest
from PIL import Image

from tests.hosts.webui.running import ASKED, HALF, PAYING, SAVED, TWICE, as_text, merged_in
from tests.webui_doubles import custom
from tome_core.settings.presets import MARKS

BUILT_IN = {"override_settings": {"token_merging_ratio": 0.5}}


@pytest.fixture(autouse=True)
def clean(webui):
    """After every test nothing may be left on the model."""
    yield
    assert webui.state()["patched"] == 0


def test_the_script_is_there_and_lists_its_arguments(webui):
    found = webui.info_of("token merging (tome)")
    labels = [one["label"] for one in found["args"]]
    assert found["is_alwayson"] and len(labels) == 24 and labels[:3] == ["Token Merging (ToMe)", "Strength", "Where"]
    assert (found["args"][1]["minimum"], found["args"][1]["maximum"], found["args"][1]["step"]) == (0, 1, 0.01)
    assert found["args"][2]["choices"] == ["everywhere", "first pass", "hires pass"]
    assert "Error loading script: token_merging.py" not in webui.said()


@pytest.mark.parametrize("args", [(), (False,), (True, 0), (custom(0),)])
def test_off_and_strength_zero_are_bit_identical_to_the_webui_without_us(webui, without, args):
    assert webui.draw(*args).pixels == without.draw_once().pixels
    assert webui.draw(*args, hires=True).pixels == without.draw_once(hires=True).pixels
    assert "ToMe" not in webui.draw(*args).infotext


def test_on_merges_says_so_and_the_picture_after_it_is_bit_identical(twins, webui):
    assert twins.law(HALF) == f"{ASKED}, 3 steps, {SAVED}"
    on = webui.draw(HALF)
    assert "ToMe: 0.5; ratio=0.5; " in on.infotext and merged_in(on) == [(1, 256, 128, 128)]
    assert webui.draw(HALF).pixels == on.pixels


def test_hires_only_leaves_the_first_pass_bit_identical(webui, without):
    expected, first_pass = without.draw(hires=True), without.state()["upscaled"][-1:]
    webui.state()
    start = len(webui.said())
    done = webui.draw({**HALF, "where": "hires pass"}, hires=True)
    assert done.pixels != expected.pixels
    assert webui.state()["upscaled"][-1:] == first_pass
    assert f"{ASKED}; first pass: left alone; hires pass: 2 steps, {SAVED}" in webui.said(start)
    assert merged_in(done, "hires pass") == [(1, 576, 288, 288)]
    webui.draw(HALF, hires=True)
    assert webui.state()["upscaled"][-1:] != first_pass


def test_img2img_merges(webui):
    more = {"path": "img2img", "init_images": [as_text(Image.effect_noise((128, 128), 60))], "denoising_strength": 0.7}
    merged = webui.draw(HALF, **more)
    assert merged.pixels != webui.draw(**more).pixels and merged_in(merged) == [(1, 256, 128, 128)]


@pytest.mark.parametrize("sampler", ["DDIM", "DPM++ 2M", "UniPC"])
def test_the_end_of_the_range_holds_for_every_kind_of_sampler(webui, sampler):
    start = len(webui.said())
    webui.draw(custom(end=0.5), sampler_name=sampler, steps=10)
    line = webui.told(start)[-1]
    steps = 9 if sampler == "DDIM" else 10  # A1111's DDIM calls the model at all of its times but one
    live = re.fullmatch(rf"{ASKED}, (\d+) of {steps} steps, \d+% of attention left out", line)
    assert live and 3 <= int(live[1]) <= 8, line


def test_a_pasted_infotext_makes_the_same_picture(webui):
    args = (custom(where="hires pass", strength=0.33, level="up to /2", end=0.9, merge_what="k+v", sx=3, merge_seed=5),)
    on = webui.draw(*args, hires=True)
    # what is given is not read from the infotext: A1111 1.10 would read "Use same sampler" there and then know no such
    # sampler, Forge fails over its own lists
    pasted = webui.draw(hires=True, infotext=on.infotext, hr_sampler_name="Euler", styles=[])
    assert pasted.pixels == on.pixels
    assert pasted.ours == on.ours and len(on.ours) == 1


@pytest.mark.parametrize("strength", MARKS.values(), ids=MARKS)
def test_a_strength_alone(twins, webui, strength):
    line = twins.law(True, strength, **PAYING)
    told = r"\d+% of attention left out|.* faster \(measured here\)"  # if the button was pressed before
    assert re.fullmatch(f"strength {strength:g}, 3 steps, ({told})", line)
    on = webui.draw(True, strength, **PAYING)
    assert on.ours == [f"ToMe: {strength:g}"] and {one[0] for one in merged_in(on)} == {1}
    pasted = webui.draw(infotext=on.infotext, styles=[], **PAYING)
    assert pasted.pixels == on.pixels and pasted.ours == on.ours


def test_a_setting_in_a_request_holds_for_its_job_alone_and_arguments_outweigh_it(webui):
    own = {"override_settings": {"tome_enabled": True, "tome_strength": 0.7}}
    plain = webui.draw(**PAYING)
    by_setting = webui.draw(**PAYING, **own)
    assert by_setting.pixels == webui.draw(True, 0.7, **PAYING).pixels != plain.pixels
    assert by_setting.ours == ["ToMe: 0.7"]
    assert webui.draw(**PAYING).pixels == plain.pixels, "nothing of it is left"
    assert webui.draw(True, 0.3, **PAYING, **own).ours == ["ToMe: 0.3"]
    assert webui.draw(False, **PAYING, **own).pixels == plain.pixels


def test_a_moved_setting_acts_on_the_next_picture_that_says_nothing(webui, without):
    try:
        webui.ask("/sdapi/v1/options", {"tome_enabled": True, "tome_strength": 0.7})
        assert webui.draw(**PAYING).ours == ["ToMe: 0.7"]
        webui.ask("/sdapi/v1/options", {"tome_strength": 0.6})
        assert webui.draw(**PAYING).ours == ["ToMe: 0.6"]
    finally:
        webui.ask("/sdapi/v1/options", {"tome_enabled": False, "tome_strength": 0.5})
    assert webui.draw().pixels == without.draw_once().pixels


def test_a_strength_merges_the_second_level_where_the_picture_is_large(webui):
    done = webui.draw(True, 0.5, **TWICE, steps=2)  # one in the early phase and one behind it
    assert {one[0] for one in merged_in(done)} == {1, 2}


def test_merged_keys_know_their_sizes_in_the_webuis_own_attention(webui):
    webui.draw(HALF)
    ways = {text for level in webui.state()["routes"].values() for text in level}
    assert ways and all(one.startswith("bias") for one in ways), ways


def test_matches_are_kept_for_no_other_pass_and_no_other_picture(twins, webui):
    kept, anew = custom(keep=1000.0), HALF
    job = {"hires": True, "n_iter": 2}
    assert twins.law(kept, **job) == f"{ASKED}; first pass: 6 steps, {SAVED}; hires pass: 4 steps, {SAVED}"
    both = webui.draw(kept, **job)
    assert both.pixels != webui.draw(anew, **job).pixels
    webui.draw(kept, prompt="a wall")
    assert webui.draw(kept, hires=True, seed=43).pixels in both.all
    assert webui.draw(kept, **job).all == both.all


def test_a_picture_too_small_to_pay_is_left_alone_with_the_built_in_merging_and_the_answer_says_why(twins, without):
    assert "nothing merged: " in twins.law(True, 0.75, merges=False)
    done = twins.webui.draw(True, 0.75, **BUILT_IN)
    assert done.pixels == without.draw_once(**BUILT_IN).pixels
    assert not done.ours and "Token merging ratio: 0.5" in done.infotext
    line = done.report["line"]
    assert "nothing merged: " in line and line.endswith("the webui's own merging (0.5) stays on")


WRONG = ['true, "0.5"', "true, NaN", "true, 1e400", "true, -Infinity", 'true, {"a": 1}, [3]', "1, [], {}",
         '{"enabled": true, "strength": Infinity}', '{"enabled": true, "": null}']  # fmt: skip


@pytest.mark.parametrize("values", WRONG)
def test_no_value_is_an_error_of_the_server_and_the_picture_is_unmerged(webui, without, values):
    start = len(webui.said())
    done = webui.draw("HERE", raw=('"HERE"', values))
    assert done.pixels == without.draw_once().pixels and "ToMe" not in done.infotext
    line = done.report["line"]
    assert "a setting is wrong: " in line and line in webui.said(start) and not done.report["merged"]


def test_the_built_in_merging_is_off_while_ours_is_on_and_as_ever_otherwise(webui, without):
    built_in = without.draw_once(**BUILT_IN).pixels
    assert webui.draw(**BUILT_IN).pixels == built_in != without.draw_once().pixels
    both = webui.draw(HALF, **BUILT_IN)
    assert both.pixels == webui.draw(HALF).pixels and "Token merging ratio" not in both.infotext
    assert webui.draw(**BUILT_IN).pixels == built_in


def test_the_refiners_model_merges_too(twins, without):
    more = {"refiner_checkpoint": "second", "refiner_switch_at": 0.5, "steps": 4}
    assert "Refiner" in without.draw_once(**more).infotext
    assert twins.law(HALF, **more) == f"{ASKED}, 4 steps, {SAVED}"


def test_an_interrupted_job_leaves_nothing(webui, without):
    stopped = webui.draw(HALF, prompt="a lake, interrupt", steps=6)
    assert stopped.pixels
    assert webui.state()["patched"] == 0
    assert webui.draw().pixels == without.draw_once().pixels


@pytest.mark.parametrize("job", [{"prompt": "a lake, fail"}, {"prompt": "a lake, fail hires", "hires": True}], ids=str)
def test_an_exception_leaves_nothing_that_the_next_picture_shows(webui, without, job):
    with pytest.raises(urllib.error.HTTPError):
        webui.draw(HALF, **job)
    assert webui.draw().pixels == without.draw_once().pixels


def test_skipping_and_interrupting_from_outside(webui, without):
    for path in ("skip", "interrupt"):
        worker = threading.Thread(target=webui.draw, args=(HALF,), kwargs={"steps": 40})
        worker.start()
        time.sleep(1.5)
        webui.ask(f"/sdapi/v1/{path}", {})
        worker.join()
    assert webui.draw().pixels == without.draw_once().pixels
