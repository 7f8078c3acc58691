"""The report of a job, on the page and for API callers; of the jobs of a selected script each report is shown."""

import copy
import json
from types import SimpleNamespace

import pytest

from tests.host_doubles.webuis import FREE, ON, TIMESTEPS, Interrupted, Processing, custom, report, sample_euler


def test_a_picture_equal_to_plain_claims_nothing_and_says_why(webui):
    plain = webui.job().latents
    for args, why in (
        ({"enabled": True}, "the picture is so small"),
        ({**FREE, "start": 0.99}, "these steps stay whole, by start and end"),
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


def fewer(model, x, sigmas, extra_args=None, callback=None, disable=None):
    """A sampler that reports every second step, and so fewer than were asked for, as DPM fast does."""
    def heard(state):
        if state["i"] % 2:
            callback({**state, "i": state["i"] // 2})

    return sample_euler(model, x, sigmas, callback=heard)


def silent(model, x, sigmas, extra_args=None, callback=None, disable=None):
    return sample_euler(model, x, sigmas, callback=lambda state: None)


for function in (twice, fewer, silent):
    function.__module__ = sample_euler.__module__
# the start of merging, then what is said; steps are at timesteps 999, 800, 500 and 150
ALL, LATE, NONE = (0.0, ", {} steps, "), (0.3, " of {} steps, "), (0.99, "nothing merged: ")


def test_steps_are_the_steps_that_were_asked_for_and_calls_are_calls(webui):
    """Whatever its sampler reports; and if the webui plans fewer or more steps than the sampler makes."""
    for function, calls in ((sample_euler, 4), (twice, 8), (fewer, 4), (silent, 4)):
        for planned in (4, 5, 20, 2):
            for start, said in (ALL, LATE, NONE):
                job = webui.job(custom(start=start), sampler_function=function, steps=planned)
                of_pass = report(job)["passes"]["first pass"]
                assert (of_pass["batches"], of_pass["steps"], of_pass["calls"]) == (1, planned, calls)
                assert said.format(planned) in job.comments, (function, job.comments)
                merged = of_pass["steps_merged"]
                assert merged == planned if start == 0 else 0 < merged < planned if start == 0.3 else merged == 0


def test_batches_that_are_alike_are_told_as_one_and_a_stopped_one_says_where(webui):
    def stops_at(last):
        seen = []

        def stopping(step):
            seen.append(step)
            if len(seen) == last:
                webui.shared.state = SimpleNamespace(interrupted=True)
                raise Interrupted

        return stopping

    # a batch has four steps, and its postprocessing
    for batches, last, said in ((3, 99, "4 steps"), (1, 3, "2 of 4 steps"), (2, 8, "6 of 8 steps in 2 batches"),
                                (1, 1, "nothing merged")):  # fmt: skip
        webui.shared.state = None
        assert f", {said}" in webui.job(*ON, n_iter=batches, at_step=stops_at(last)).comments


def test_a_script_that_samples_by_itself_is_named_as_the_reason(webui):
    """As "img2img alternative test", which replaces the job's method, and calls a sampler of its own, or the model."""
    expected = webui.plain().latents
    for args, said in ((ON, "nothing merged: a script drew the picture by itself (img2img alternative test does)"),
                       (({**FREE, "strength": 0},), "left alone")):  # fmt: skip
        p = Processing(webui, args)
        p.sample = lambda p=p: webui.plain(seed=p.seed).latents
        job = webui.process(p)
        assert job.latents.equal(expected) and f", {said}\n" in job.comments and report(job)["merged"] is False
        (reason,) = report(job)["passes"]["first pass"]["stepped_aside"] or [""]
        assert reason in said


def fields(data):
    """The names of all fields of a report but those that are data themselves."""
    passes = {name: sorted(of_pass) for name, of_pass in data["passes"].items()}
    return sorted(data), passes


def test_the_data_have_the_same_fields_whatever_happened(webui):
    """Merged, too few tokens, off, the other pass, an error, a value left out, a hires pass, a script by itself."""
    cases = [(ON, {}), (({"enabled": True},), {}), (({**FREE, "strength": 0},), {}), ((True, 0.5, "hires pass"), {}),
             ((True, "much"), {}), (({**FREE, "sx": 99},), {}), (ON, {"enable_hr": True}),
             (ON, {"sample": lambda: webui.plain().latents})]  # fmt: skip
    seen = []
    for args, more in cases:
        data = report(webui.job(*args, **more))
        json.dumps(data, allow_nan=False)
        (alone,) = data["jobs"]
        assert {name: value for name, value in data.items() if name != "jobs"} == alone
        seen += [fields(data)]
    assert all(each == seen[0] for each in seen[1:])
    wrong = report(webui.job(True, "much"))
    assert wrong["error"] and (wrong["strength"], wrong["where"]) == (None, None)


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


def test_a_script_that_runs_copies_of_its_job_gets_the_report_of_all(webui, of_script):
    """Such scripts are Prompts from file, and a plot, which reuses a copy of its first cell's result.

    A copy with merging off gets no report.
    """
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
