"""The report of a job, on the page and for API callers; of the jobs of a selected script each report is shown."""

import copy

import pytest

from tests.webui_doubles import FREE, ON, TIMESTEPS, Processing, custom, report, sample_euler


def test_a_picture_equal_to_plain_claims_nothing_and_says_why(webui):
    plain = webui.job().latents
    for args, why in (
        ({"enabled": True}, "so few tokens"), ({**FREE, "start": 0.99}, "these steps stay whole, by start and end"),
        ({**FREE, "strength": 0}, "strength 0, left alone"),
        ({**FREE, "where": "hires pass"}, "not merged, because only the hires pass is to merge, and there is none")):
        job = webui.job(args)
        assert job.latents.equal(plain) and job.infotexts == [""]
        assert report(job)["merged"] is False and why in report(job)["line"]


def test_the_report_is_shown_in_the_places_of_the_setting(webui, log):
    for place in ("console and page", "console", "page", "nowhere"):
        log.clear()
        webui.shared.opts.data["tome_report"] = place
        job = webui.job(*ON)
        assert len(log) == ("console" in place) and bool(job.comments) is ("page" in place) and report(job)["merged"]


def twice(model, x, sigmas, extra_args=None, callback=None, disable=None):
    """A second-order sampler, which calls the model again after each step's report."""
    def heard(state):
        callback(state)
        model(state["x"], state["sigma"], TIMESTEPS[state["i"]])

    return sample_euler(model, x, sigmas, callback=heard)


twice.__module__ = sample_euler.__module__


def test_steps_are_steps_and_calls_are_calls(webui):
    for start, steps in ((0.0, "4 steps"), (0.3, "2 of 4 steps")):
        job = webui.job(custom(start=start), sampler_function=twice)
        of_pass = report(job)["passes"]["first pass"]
        assert (of_pass["steps"], of_pass["calls"]) == (4, 8) and f", {steps}, " in job.comments, job.comments


# --- scripts ----------------------------------------------------------------------------------------------------------

@pytest.fixture
def of_script(webui):
    """A job that a selected script runs."""
    comments = []
    return Processing(webui, (), script_args=(3, "its own"), comments=comments, comment=comments.append)


def test_a_script_gets_the_pictures_that_it_would_get_and_the_report_of_each_job(webui, of_script):
    """Such scripts are Loopback, SD upscale, which joins the pictures, and Outpainting."""
    for number in range(2):  # a second request starts again
        of_script.script_args = (3, f"request {number}")
        of_script.comments.clear()
        for ratio in (0.5, 0.25):
            of_script.args = [custom(ratio)]
            job = webui.process(of_script)
            assert "ToMe report" not in job.infotexts[0] and not job.comments
        fact = of_script.extra_generation_params["ToMe report"]
        assert fact["merged"] and [job["settings"]["ratio"] for job in fact["jobs"]] == [0.5, 0.25]
        assert len(of_script.comments) == 2 and all(", 4 steps, " in line for line in of_script.comments)


def test_so_has_one_whose_jobs_were_copies(webui, of_script):
    """Such scripts are Prompts from file, and a plot, which reuses a copy of its first cell's result."""
    first, second = copy.copy(of_script), copy.copy(of_script)
    first.args, second.args = [{**FREE, "strength": 0}], [{**FREE, "strength": 0.7}]
    of_plot = webui.process(first)
    webui.process(second)
    for result in (second, of_plot):
        assert report(result)["merged"] and [job["strength"] for job in report(result)["jobs"]] == [0, 0.7]
    off = copy.copy(second)
    off.args = [False]
    assert webui.part("merging").job_of(off) is None, "a copy has no job yet"
    unmerged = webui.process(off)
    assert unmerged.infotexts == [""] and "ToMe report" not in unmerged.extra_generation_params
