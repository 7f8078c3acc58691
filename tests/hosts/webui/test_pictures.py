"""A real webui over its HTTP API: what is bit-identical, what is not, and what it says."""

from __future__ import annotations

import threading
import time
import urllib.error

import pytest

from tests.hosts.webui.running import PAYING, TWICE
from tome_core import PRESETS, preset

ON = (True, 0.5)


@pytest.fixture(autouse=True)
def clean(webui):
    """After every test nothing may be left on the model."""
    yield
    assert webui.state()["patched"] == 0


def test_the_script_is_there_and_lists_its_arguments(webui):
    (found,) = [one for one in webui.ask("/sdapi/v1/script-info")
                if one["name"] == "token merging (tome)" and not one["is_img2img"]]  # fmt: skip
    labels = [one["label"] for one in found["args"]]
    assert found["is_alwayson"] and len(labels) == 27 and labels[:3] == ["Token Merging (ToMe)", "Preset", "Ratio"]
    assert (found["args"][2]["minimum"], found["args"][2]["maximum"], found["args"][2]["step"]) == (0, 1, 0.05)
    assert found["args"][3]["choices"] == ["same", "off", "own ratio", "only hires"]
    assert "Error loading script: token_merging.py" not in webui.said()


@pytest.mark.parametrize("args", [(), (False,), (True, "custom", 0)])
def test_off_and_ratio_zero_are_bit_identical_to_the_webui_without_us(webui, without, args):
    assert without["plain"] == without["plain again"]
    assert webui.draw(*args).pixels == without["plain"]
    assert webui.draw(*args, hires=True).pixels == without["hires"]
    assert "ToMe" not in webui.draw(*args).infotext


def test_on_merges_says_so_and_the_picture_after_it_is_bit_identical(webui, without):
    start = len(webui.said())
    on = webui.draw(*ON)
    assert on.pixels != without["plain"] and "ToMe ratio: 0.5" in on.infotext
    assert "ToMe: level 0 (/1) 256 -> 128 tokens, 75% of its attention saved, 3 steps" in webui.said(start)
    assert webui.draw(*ON).pixels == on.pixels
    assert webui.draw().pixels == without["plain"]


def test_hires_only_leaves_the_first_pass_bit_identical(webui, without):
    webui.state()
    start = len(webui.said())
    done = webui.draw(*ON, "only hires", hires=True)
    assert done.pixels != without["hires"]
    assert webui.state()["upscaled"][-1:] == without["first pass"]
    assert "first pass: left alone; hires pass: level 0 (/1) 576 -> 288" in webui.said(start)
    webui.draw(*ON, hires=True)
    assert webui.state()["upscaled"][-1:] != without["first pass"]


def test_img2img_merges(webui):
    import base64
    import io

    from PIL import Image

    file = io.BytesIO()
    Image.effect_noise((128, 128), 60).convert("RGB").save(file, "PNG")
    more = {"path": "img2img", "init_images": [base64.b64encode(file.getvalue()).decode()], "denoising_strength": 0.7}
    start = len(webui.said())
    assert webui.draw(*ON, **more).pixels != webui.draw(**more).pixels
    assert "256 -> 128 tokens" in webui.said(start)


def test_batches_merge_alike(webui):
    start = len(webui.said())
    done = webui.draw(*ON, n_iter=2, batch_size=2)
    assert len(done.all) >= 4 and "75% of its attention saved, 6 steps" in webui.said(start)
    assert webui.draw(*ON, n_iter=2, batch_size=2).all == done.all


@pytest.mark.parametrize("sampler", ["DDIM", "DPM++ 2M", "UniPC"])
def test_the_end_of_the_range_holds_for_every_kind_of_sampler(webui, sampler):
    start = len(webui.said())
    webui.draw(*ON, "same", 0.5, "automatic", 0.0, 0.5, sampler_name=sampler, steps=10)
    steps = webui.said(start).partition("attention saved, ")[2].split(" ")[:4]
    assert steps[1] == "of" and 3 <= int(steps[0]) <= 8 and 9 <= int(steps[2]) <= 11, webui.said(start)[-600:]


def test_a_pasted_infotext_makes_the_same_picture(webui):
    args = (*ON, "own ratio", 0.25, "up to /2", 0.0, 0.9, 0, "bipartite", "k+v", False, False, 3, 2, False, 5)
    on = webui.draw(*args, hires=True)
    # what is given is not read from the infotext: A1111 1.10 would read "Use same sampler" there and then know no such
    # sampler, Forge fails over its own lists
    pasted = webui.draw(hires=True, infotext=on.infotext, hr_sampler_name="Euler", styles=[])
    assert pasted.pixels == on.pixels
    assert [one for one in pasted.infotext.split(", ") if "ToMe" in one] == [
        one for one in on.infotext.split(", ") if "ToMe" in one]  # fmt: skip


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_by_its_name_alone(twins, webui, name):
    line = twins.law(True, name, **PAYING)
    assert line.startswith("level 0 (/1) ") and "attention saved, 3 steps" in line
    on = webui.draw(True, name, **PAYING)
    assert f"ToMe preset: {name}" in on.infotext and f"ToMe keep: {preset(name).rules[0].keep}" in on.infotext
    pasted = webui.draw(infotext=on.infotext, styles=[], **PAYING)
    assert pasted.pixels == on.pixels and "ToMe preset" not in pasted.infotext


def test_a_preset_merges_the_second_level_where_the_picture_is_large(twins):
    line = twins.law(True, "balanced", **TWICE, steps=2)  # one in the early phase and one behind it
    first, found, second = line.partition("level 1 (/2) ")
    assert found and first.startswith("level 0 (/1) ") and "MLP" not in first, line
    assert "of its attention saved" in second and "level 2" not in second and "MLP" not in second, line


def test_merged_keys_know_their_sizes_in_the_webuis_own_attention(webui):
    webui.draw(*ON)
    ways = {text for level in webui.state()["routes"].values() for text in level}
    assert ways and ways <= {"bias", "wider heads"}, ways


def test_matches_are_kept_for_no_other_pass_and_no_other_picture(twins, webui):
    on = {"Token_Merging_(ToMe)": True, "Preset": "custom"}
    kept, anew = (webui.values_of("token merging (tome)", **on, Keep_a_match_for=time) for time in (1000, 0))
    job = {"hires": True, "n_iter": 2}
    assert "75% of its attention saved" in twins.law(*kept, **job)
    both = webui.draw(*kept, **job)
    assert both.pixels != webui.draw(*anew, **job).pixels
    webui.draw(*kept, prompt="a wall")
    assert webui.draw(*kept, hires=True, seed=43).pixels in both.all
    assert webui.draw(*kept, **job).all == both.all


def test_a_preset_in_the_hires_pass_only(twins, webui):
    twins.without.state(), twins.without.draw(**PAYING, hires=True)
    first_pass = twins.without.state()["upscaled"][-1:]
    webui.state()
    line = twins.law(True, "fast", 0.5, "only hires", **PAYING, hires=True)
    assert line.startswith("first pass: left alone; hires pass: level 0 (/1) ")
    webui.draw(True, "fast", 0.5, "only hires", **PAYING, hires=True)
    assert webui.state()["upscaled"][-1:] == first_pass


def test_a_preset_leaves_a_picture_alone_that_is_too_small_to_pay(twins):
    assert "nothing merged: " in twins.law(True, "fast", merges=False)


def test_wrong_values_are_told_and_the_picture_is_unmerged(webui, without):
    start = len(webui.said())
    done = webui.draw(True, "custom", "0.5")
    assert done.pixels == without["plain"] and "ToMe" not in done.infotext
    assert "ratio='0.5' is str; use a number from 0.0 to 1.0" in done.facts["extra_generation_params"]["ToMe error"]
    assert "ratio='0.5' is str" in webui.said(start)


def test_a_plot_over_the_ratio(webui, without):
    info = next(one for one in webui.ask("/sdapi/v1/script-info") if one["name"] == "x/y/z plot"
                and not one["is_img2img"])  # fmt: skip
    args = [one["value"] for one in info["args"]]
    labels = [one["label"] for one in info["args"]]
    choices = info["args"][labels.index("X type")]["choices"]
    args[labels.index("X type")] = choices.index("[ToMe] Ratio")
    args[labels.index("X values")] = "0, 0.5, 0"
    for axis in ("Y type", "Z type"):
        args[labels.index(axis)] = choices.index("Nothing")
    args[labels.index("Include Sub Images")] = True
    done = webui.draw(False, "custom", script_name="x/y/z plot", script_args=args)
    cells, texts = done.all[-3:], done.facts["infotexts"][-3:]
    assert cells[0] == cells[2] == without["plain"] != cells[1]
    assert ["ToMe ratio: 0.5" in text for text in texts] == [False, True, False]


def test_the_built_in_merging_is_off_while_ours_is_on_and_as_ever_otherwise(webui, without):
    built_in = {"override_settings": {"token_merging_ratio": 0.5}}
    assert webui.draw(**built_in).pixels == without["built-in"] != without["plain"]
    both = webui.draw(*ON, **built_in)
    assert both.pixels == webui.draw(*ON).pixels and "Token merging ratio" not in both.infotext
    assert webui.draw(**built_in).pixels == without["built-in"]


def test_the_refiners_model_merges_too(webui):
    more = {"refiner_checkpoint": "second", "refiner_switch_at": 0.5, "steps": 4}
    plain = webui.draw(**more)
    start = len(webui.said())
    done = webui.draw(*ON, **more)
    assert done.pixels != plain.pixels and "Refiner" in done.infotext
    assert "75% of its attention saved, 4 steps" in webui.said(start)
    assert webui.draw(**more).pixels == plain.pixels


def test_an_interrupted_job_leaves_nothing(webui, without):
    stopped = webui.draw(*ON, prompt="a lake, interrupt", steps=6)
    assert stopped.pixels
    assert webui.state()["patched"] == 0
    assert webui.draw().pixels == without["plain"]


def test_an_exception_leaves_nothing_that_the_next_picture_shows(webui, without):
    with pytest.raises(urllib.error.HTTPError):
        webui.draw(*ON, prompt="a lake, fail")
    assert webui.draw().pixels == without["plain"]


def test_skipping_and_interrupting_from_outside(webui, without):
    for path in ("skip", "interrupt"):
        worker = threading.Thread(target=webui.draw, args=ON, kwargs={"steps": 40})
        worker.start()
        time.sleep(1.5)
        webui.ask(f"/sdapi/v1/{path}", {})
        worker.join()
    assert webui.draw().pixels == without["plain"]


def test_the_merge_map_is_one_more_picture(webui, without):
    done = webui.draw(*ON, override_settings={"tome_map": True})
    assert len(done.all) == 2 and done.all[0] == webui.draw(*ON).pixels
    assert len(webui.draw(override_settings={"tome_map": True}).all) == 1
