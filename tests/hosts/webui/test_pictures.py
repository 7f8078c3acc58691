"""A real webui over its HTTP API: which pictures are bit-identical, which merge, and what their report says."""

import re
import threading
import time
import urllib.error

import pytest

from tests.host_doubles.webuis import custom
from tests.hosts.webui.running import ASKED, HALF, PAYING, PICTURE, SAVED, TWICE

BUILT_IN = {"override_settings": {"token_merging_ratio": 0.5}}


@pytest.fixture(autouse=True)
def clean(webui):
    """After every test nothing may be left on the model."""
    yield
    assert webui.state()["patched"] == 0


def test_on_merges_by_the_webuis_own_attention_says_so_and_repeats_itself(twins, webui):
    assert twins.law(HALF) == f"{ASKED}, 3 steps, {SAVED}"
    on = webui.draw(HALF)
    assert "ToMe: 0.5; ratio=0.5; " in on.infotext and on.merged == [(1, 256, 128, 128)]
    routes = webui.state()["routes"]
    assert routes and all(route.startswith("bias") for route in routes)  # Forge's attentions are torch's function
    assert webui.draw(HALF).pixels == on.pixels


def test_the_end_of_the_range_holds_for_every_kind_of_sampler_and_steps_are_those_asked_for(webui):
    # DDIM calls at all of its times but one; Heun twice a step; DPM fast reports fewer steps
    for sampler in ("DDIM", "DPM++ 2M", "UniPC", "Heun", "DPM fast", "DPM adaptive"):
        line = webui.draw(custom(end=0.5), sampler_name=sampler, steps=10).report["line"]
        live = re.fullmatch(rf"{ASKED}, (\d+) of 10 steps, \d+% less work", line)
        assert live and 3 <= int(live[1]) <= 9, (sampler, line)
    for sampler in ("DDIM", "DPM fast", "Euler"):
        on = webui.draw(HALF, sampler_name=sampler, steps=4, n_iter=2)
        assert f"{ASKED}, 4 steps, " in on.report["line"], sampler


def test_image_to_image_has_the_webuis_own_number_of_steps(twins, webui):
    """A half of 10 steps, and one more: so many does the webui's progress show."""
    job = {"path": "img2img", "init_images": [PICTURE], "denoising_strength": 0.5, "steps": 10}
    for each in twins:  # a process's first picture differs, without us too: it is encoded with unseeded noise
        each.draw(**job)
    for sampler in ("Euler", "DDIM"):
        assert twins.law(HALF, **job, sampler_name=sampler) == f"{ASKED}, 6 steps, {SAVED}"


def test_a_script_that_samples_by_itself_draws_unmerged_and_the_report_says_so(twins):
    """By position: no text; sampler, prompts, steps, denoising; guidance, randomness, sigmas."""
    values = [None, True, True, "a lake", "", True, 3, True, 1.0, 0.0, False]
    job = {"path": "img2img", "init_images": [PICTURE], "script_name": "img2img alternative test",
           "script_args": values}  # fmt: skip
    try:
        twins.without.draw(**job)
    except urllib.error.HTTPError as error:
        pytest.skip(f"the script fails in this webui without us: {error.read()[:300]}")
    twins.webui.draw(**job)
    assert "nothing merged: a script drew the picture by itself" in twins.law(HALF, **job, merges=False)


def test_a_pasted_infotext_makes_the_same_picture(webui):
    wish = custom(0.75, where="hires pass", strength=0.33, level="up to /2", end=0.9, merge_what="k+v", sx=3,
                  merge_seed=5)  # at 0.5 merging would cost as much as it saves
    on = webui.draw(wish, hires=True)
    # given settings are not read from the infotext: A1111 1.10 would read "Use same sampler" there and not know that
    # sampler, Forge fails over its own lists
    pasted = webui.draw(hires=True, infotext=on.infotext, hr_sampler_name="Euler", styles=[])
    assert pasted.pixels == on.pixels and pasted.ours == on.ours and len(on.ours) == 1


def test_a_strength_alone_merges_what_pays_at_the_pictures_size(twins, webui):
    line = twins.law(True, 0.75, **PAYING)
    assert re.fullmatch(r"strength 0.75, 3 steps, \d*% less work", line)
    on = webui.draw(True, 0.75, **PAYING)
    assert on.ours == ["ToMe: 0.75"] and {level for level, *_ in on.merged} == {1}
    large = webui.draw(True, 0.5, **TWICE, steps=2)  # a step in the early phase, and one after it
    assert {level for level, *_ in large.merged} == {1, 2}


def test_the_built_in_merging_is_off_while_ours_is_on_and_as_ever_otherwise(webui, without):
    built_in, plain = without.draw_once(**BUILT_IN).pixels, without.draw_once().pixels
    assert webui.draw(**BUILT_IN).pixels == built_in != plain
    both = webui.draw(HALF, **BUILT_IN)
    assert both.pixels == webui.draw(HALF).pixels and "Token merging ratio" not in both.infotext
    small = webui.draw(True, 0.75, **BUILT_IN)
    assert small.pixels == built_in and not small.ours and "Token merging ratio: 0.5" in small.infotext
    assert re.search("nothing merged: .*the webui's own merging .0.5. stays on$", small.report["line"])


def test_a_job_that_ends_early_leaves_nothing(webui, without):
    """The probe ends the job from inside, and the buttons end it."""
    plain = without.draw_once().pixels
    for job in ({"prompt": "a lake, fail"}, {"prompt": "a lake, fail hires", "hires": True}):
        with pytest.raises(urllib.error.HTTPError):
            webui.draw(HALF, **job)
        assert webui.state()["patched"] == 0, "at once"
        assert webui.draw().pixels == plain
    for path in ("skip", "interrupt"):
        drawn = []
        worker = threading.Thread(target=lambda add=drawn.append: add(webui.draw(HALF, steps=40)))
        worker.start()
        state = {}
        while worker.is_alive() and not (state.get("sampling_steps") == 40 and 2 <= state["sampling_step"] < 40):
            time.sleep(0.1)
            state = webui.ask("/sdapi/v1/progress")["state"]  # of the job before until this one samples
        webui.ask(f"/sdapi/v1/{path}", {})
        worker.join()
        assert webui.state()["patched"] == 0
        (line,) = [picture.report["line"] for picture in drawn]
        stopped = re.fullmatch(rf"{ASKED}, (\d+) of 40 steps, \d+{SAVED}", line)
        assert stopped and 1 <= int(stopped[1]) < 40, line
        assert webui.draw().pixels == plain
