"""In a real webui, scripts that its user selects, which go on with our jobs' pictures; and what the API is told."""

from __future__ import annotations

import pytest
from PIL import Image

from tests.hosts.webui.running import HALF, as_text, merged_in

PICTURE = as_text(Image.linear_gradient("L").rotate(30).resize((128, 128)))
WIDE = as_text(Image.linear_gradient("L").rotate(30).resize((192, 192)))
# a script's arguments in their order, how many jobs it runs, what it begins with
SCRIPTS = {
    "prompt matrix": ([False, False, "positive", "comma", 0], 1, {"prompt": "a lake|fog"}),
    "prompts from file or textbox": ([False, False, "start", "a lake\na wall"], 2, {}),
    "loopback": ([2, 0.5, "Linear", "None"], 2, {"init_images": [PICTURE]}),
    "sd upscale": (["", 64, 0, 2.0], 4, {"init_images": [WIDE]}),
    "outpainting mk2": (["", 64, 8, ["left"], 1.0, 0.05], 1, {"init_images": [PICTURE]}),
    "poor man's outpainting": ([64, 4, 0, ["left"]], 1, {"init_images": [PICTURE]}),
}  # fmt: skip


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_gets_the_pictures_that_it_would_get_and_tells_of_each_job(twins, script):
    args, jobs, more = SCRIPTS[script]
    job = {"script_name": script, "script_args": args, **more}
    if "init_images" in more:
        job |= {"path": "img2img", "denoising_strength": 0.6}
        for webui in twins:  # the first one of a process differs, without us too: it is encoded with unseeded noise
            webui.draw(**job)
    merged = twins.webui.draw(HALF, **job)
    assert len(merged.all) == len(twins.without.draw(**job).all)
    assert merged.report["merged"] and len(merged.report.get("jobs", [merged.report])) == jobs
    assert twins.webui.draw(**job).all == twins.without.draw(**job).all
    assert twins.webui.state()["patched"] == 0


def test_steps_are_the_users_and_calls_the_models(twins):
    done = twins.webui.draw(HALF, sampler_name="Heun", steps=4)
    of_pass = done.report["passes"]["first pass"]
    assert of_pass["steps"] == of_pass["steps_merged"] == 4 and of_pass["calls"] > 4
    assert "4 steps, " in done.report["line"] and merged_in(done)


def test_what_was_dropped_is_named_and_what_is_in_force_is_not(twins):
    done = twins.webui.draw({**HALF, "start": 0.5, "end": 0.1})
    assert done.report["not_used"] == ["end=0.1, because start=0.5 lies after end=0.1; swap them"]
    assert "; start=0.5" in done.infotext and "; end=" not in done.infotext


def test_an_unreadable_infotext_over_the_api_is_told_in_the_answer(twins):
    infotext = "a lake\nSteps: 3, Sampler: Euler, CFG scale: 7, Seed: 42, Size: 128x128, ToMe: much"
    done = twins.webui.draw(infotext=infotext, styles=[])
    assert done.pixels == twins.without.draw_once().pixels
    assert done.report["merged"] is False and "strength=nan is no number from 0 to 1" in done.report["line"]
