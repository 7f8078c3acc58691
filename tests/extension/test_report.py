"""What is told of a job, to whoever drew and to API callers; also of the jobs that a selected script runs.

Such a script goes on with the job's pictures and makes a result of its own: none is added, each report is told.
"""

from __future__ import annotations

import copy

import pytest

from tests import webui_doubles
from tests.webui_doubles import FREE, ON, Processing, custom, report


@pytest.mark.parametrize(("args", "why"), [
    ({"enabled": True}, "so few tokens"), ({**FREE, "start": 0.99}, "outside the rules' time range"),
    ({**FREE, "strength": 0}, "strength 0, left alone"),
    ({**FREE, "where": "hires pass"}, "left alone, because only the hires pass is to merge, and there is none"),
], ids=lambda value: str(value)[:20])  # fmt: skip
def test_a_picture_equal_to_plain_claims_nothing_and_says_why(webui, args, why):
    job = webui.job(args)
    assert job.latents.equal(webui.job().latents) and job.infotexts == [""]
    assert report(job)["merged"] is False and why in report(job)["line"]


@pytest.mark.parametrize(("place", "console", "page"), [
    ("console and page", 1, True), ("console", 1, False), ("page", 0, True), ("nowhere", 0, False)])  # fmt: skip
def test_the_report_is_shown_in_the_places_of_the_setting(webui, log, place, console, page):
    webui.shared.opts.data["tome_report"] = place
    job = webui.job(*ON)
    assert len(log) == console and bool(job.comments) is page and report(job)["merged"]


@pytest.mark.parametrize(("start", "steps"), [(0.0, "4 steps"), (0.3, "2 of 4 steps")])
def test_steps_are_steps_and_calls_are_calls(webui, start, steps):
    """Of a second-order sampler, which calls the model twice a step."""

    def twice(model, x, sigmas, extra_args=None, callback=None, disable=None):
        for i, (sigma, timestep) in enumerate(zip(webui_doubles.SIGMAS, webui_doubles.TIMESTEPS, strict=True)):
            called = model(x, sigma, timestep)
            callback({"x": x, "i": i, "sigma": sigmas[i], "denoised": called})
            model(x, sigma, timestep)
            x = x - 0.2 * called
        return x

    for module in ("k_diffusion.sampling", "another.pack"):
        twice.__module__ = module
        job = webui.job(custom(start=start), sampler_function=twice)
        of_pass = report(job)["passes"]["first pass"]
        assert (of_pass["steps"], of_pass["calls"]) == (4, 8) and f", {steps}, " in job.comments, job.comments


# --- scripts ----------------------------------------------------------------------------------------------------------


class Processed:
    """modules.processing.Processed, as a script makes it of its own pictures."""

    def __init__(self, p):
        self.extra_generation_params = p.extra_generation_params
        self.comments = "".join(f"{comment}\n" for comment in p.comments)


class OfScript(Processing):
    """A job that a selected script runs, in a webui of today."""

    def __init__(self, *args, **more):
        super().__init__(*args, script_args=(3, "its own"), comments={}, **more)

    def comment(self, text):
        self.comments[text] = 1


def test_a_script_gets_the_pictures_that_it_would_get_and_the_report_of_each_job(webui):
    """Loopback, SD upscale, which pastes the pictures together, and Outpainting."""
    for _ in range(2):  # a second request begins anew
        p = OfScript(webui, ())
        p.script_args = tuple(list(p.script_args))
        for ratio in (0.5, 0.25):
            p.args = [custom(ratio)]
            job = webui.process(p)
            assert "ToMe report" not in job.infotexts[0] and len(job.images) == 1
        result = Processed(p)
        fact = result.extra_generation_params["ToMe report"]
        assert fact["merged"] and [job["settings"]["ratio"] for job in fact["jobs"]] == [0.5, 0.25]
        assert result.comments.count("ToMe: strength 0.5, own settings, 4 steps") == 2


def test_so_has_one_whose_jobs_were_copies(webui):
    """Prompts from file; and a plot, which goes on with a copy of its first cell's result."""
    p, cells = OfScript(webui, ()), []
    for strength in (0.0, 0.7):
        cell = copy.copy(p)
        cell.args = [{**FREE, "strength": strength}]
        cells.append(webui.process(cell))
    for fact in (Processed(p).extra_generation_params["ToMe report"], report(cells[0])):
        assert fact["merged"] and [job["strength"] for job in fact["jobs"]] == [0.0, 0.7]
    assert "strength" not in cells[0].comments, "it is not about the other cells"
    off = copy.copy(p)
    off.args = [False]
    assert "ToMe report" not in webui.process(off).extra_generation_params
