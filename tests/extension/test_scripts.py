"""Selected scripts run jobs and make a result of their own: no picture is added to any, each report is told."""

from __future__ import annotations

import copy
import types

import pytest

from tests.webui_doubles import Processing, custom, report

pytestmark = pytest.mark.usefixtures("small")


class Processed:
    """modules.processing.Processed, as a script makes it of its own pictures."""

    def __init__(self, p):
        self.extra_generation_params = p.extra_generation_params
        self.comments = "".join(f"{one}\n" for one in p.comments)


class OfScript(Processing):
    """A job that a selected script runs, in a webui of today."""

    def __init__(self, *args, **more):
        super().__init__(*args, script_args=(3, "its own"), comments={}, **more)

    def comment(self, text):
        self.comments[text] = 1


def test_a_script_gets_the_pictures_that_it_would_get_without_us(webui):
    """SD upscale pastes them together, Prompt matrix counts them."""
    for p in (Processing(webui, (custom(),)), OfScript(webui, (custom(),))):
        assert len(webui.process(p).images) == 1


def test_a_result_that_a_script_makes_of_several_jobs_has_the_report_of_each(webui):
    """Loopback, SD upscale, Outpainting."""
    p = OfScript(webui, (custom(),))
    for ratio in (0.5, 0.25):
        p.args = [custom(ratio)]
        assert "ToMe report" not in webui.process(p).infotexts[0]
    made = Processed(p)
    told = made.extra_generation_params["ToMe report"]
    assert told["merged"] and [one["settings"]["ratio"] for one in told["jobs"]] == [0.5, 0.25]
    assert made.comments.count("ToMe: strength 0.5, own settings, 4 steps") == 2


def test_so_has_one_whose_jobs_were_copies(webui):
    """Prompts from file; and a plot, which goes on with a copy of its first cell's result."""
    p, cells = OfScript(webui, ()), []
    for strength in (0.0, 0.7):
        cell = copy.copy(p)
        cell.args = [{"enabled": True, "strength": strength, "only_if_it_pays": False}]
        cells.append(webui.process(cell))
    for told in (Processed(p).extra_generation_params["ToMe report"], report(cells[0])):
        assert told["merged"] and [one["strength"] for one in told["jobs"]] == [0.0, 0.7]
    assert "strength" not in cells[0].comments, "it is not about the other cells"
    off = copy.copy(p)
    off.args = [False]
    assert "ToMe report" not in webui.process(off).extra_generation_params


def test_a_second_request_begins_anew(webui):
    for _ in range(2):
        p = OfScript(webui, (custom(),))
        p.script_args = tuple(list(p.script_args))
        assert "jobs" not in report(webui.process(p))


class AxisOption(types.SimpleNamespace):
    """As the plot's."""

    def __init__(self, label, type, apply, confirm=None, choices=None):
        super().__init__(label=label, type=type, apply=apply, confirm=confirm, choices=choices)


def test_a_plots_axis_refuses_what_would_be_drawn_unmerged_under_its_label(webui):
    plot = types.SimpleNamespace(axis_options=[], AxisOption=AxisOption)
    data = types.SimpleNamespace(script_class=type("Script", (), {"__module__": "xyz_grid.py"}), module=plot)
    webui.scripts.scripts_data.append(data)
    webui.call("before_ui")
    axes, p = {one.label: one for one in plot.axis_options}, Processing(webui, (False,))
    axes["[ToMe] Strength"].confirm(p, [0.0, 0.5, 1.0])
    axes["[ToMe] Where"].confirm(p, ["hires pass"])
    wrong = (("Strength", [0.5, 1.5], "1.5 is no number from 0 to 1"), ("Where", ["hires"], "where='hires'"))
    for label, values, said in wrong:
        with pytest.raises(RuntimeError, match=said):
            axes[f"[ToMe] {label}"].confirm(p, values)
    (ratio,) = (one for label, one in axes.items() if label == "[ToMe] Ratio")
    ratio.confirm(p, [0.3])
    with pytest.raises(RuntimeError, match="ratio=7"):
        ratio.confirm(p, [0.3, 7])


@pytest.mark.parametrize(("start", "end", "steps"), [(0.0, 1.0, "4 steps"), (0.3, 1.0, "2 of 4 steps")])
def test_steps_are_steps_and_calls_are_calls(webui, start, end, steps):
    """Of a second-order sampler, which calls the model twice a step."""
    from tests import webui_doubles

    def twice(model, x, sigmas, extra_args=None, callback=None, disable=None):
        for i, (sigma, timestep) in enumerate(zip(webui_doubles.SIGMAS, webui_doubles.TIMESTEPS, strict=True)):
            called = model(x, sigma, timestep)
            callback({"x": x, "i": i, "sigma": sigmas[i], "denoised": called})
            model(x, sigma, timestep)
            x = x - 0.2 * called
        return x

    for module in ("k_diffusion.sampling", "another.pack"):
        twice.__module__, twice.__name__ = module, "sample_heun"
        done = webui.job(custom(start=start, end=end), sampler_function=twice)
        of_pass = report(done)["passes"]["first pass"]
        assert (of_pass["steps"], of_pass["calls"]) == (4, 8) and f", {steps}, " in done.comments, done.comments


def test_what_was_dropped_is_named_and_what_is_in_force_is_not(webui):
    told = report(webui.job({"enabled": True, "start": 0.9, "end": 0.1, "only_if_it_pays": False}))
    assert told["not_used"] == ["end=0.1, because start=0.9 lies after end=0.1; swap them"]
    assert told["settings"]["start"] == 0.9
