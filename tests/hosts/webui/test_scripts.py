"""In a real webui, scripts that its user selects, which go on with our jobs' pictures; among them plots of settings."""

from __future__ import annotations

import urllib.error

import pytest

from tests.hosts.webui.running import HALF, PAYING, ours, picture_to_start_from
from tests.webui_doubles import custom

PICTURE, WIDE = picture_to_start_from(), picture_to_start_from(192)
# a script's arguments in their order, how many jobs it runs, what it begins with
SCRIPTS = {
    "prompt matrix": ([False, False, "positive", "comma", 0], 1, {"prompt": "a lake|fog"}),
    "prompts from file or textbox": ([False, False, "start", "a lake\na wall"], 2, {}),
    "loopback": ([2, 0.5, "Linear", "None"], 2, {"init_images": [PICTURE]}),
    "sd upscale": (["", 64, 0, 2.0], 4, {"init_images": [WIDE]}),
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


# axis -> its values as text, the arguments that each stands for, the plot's, the job
AXES = {
    "Strength": ("0, 0.5, 0.7", [(True, 0), (True, 0.5), (True, 0.7)], (False,), PAYING),
    "Where": ("first pass, hires pass", [({**HALF, "where": where},) for where in ("first pass", "hires pass")],
              (HALF,), {"hires": True}),
    "Level": ("automatic, up to /2", [(custom(level=level),) for level in ("automatic", "up to /2")], (HALF,), {}),
}  # fmt: skip


def plot(webui, *args, x, y=None, **job):
    """The cells, row by row, their infotexts, and the report; x, y: (our axis, values as text)."""
    info = webui.info_of("x/y/z plot")
    choices = next(arg["choices"] for arg in info["args"] if arg["label"] == "X type")
    axes = {"X": x, "Y": y, "Z": None}
    types = {f"{letter}_type": choices.index(f"[ToMe] {axis[0]}" if axis else "Nothing")
             for letter, axis in axes.items()}  # fmt: skip
    texts = {f"{letter}_values": axis[1] if axis else "" for letter, axis in axes.items()}
    values = webui.values_of("x/y/z plot", **types, **texts, Include_Sub_Images=True,
                             Use_text_inputs_instead_of_dropdowns=True)  # fmt: skip
    picture = webui.draw(*args, script_name="x/y/z plot", script_args=values, **job)
    cells = [image for image in picture.all if len(image) == min(map(len, picture.all))]
    return cells, picture.facts["infotexts"][-len(cells) :], picture.report


@pytest.mark.parametrize("axis", AXES)
def test_each_cell_of_a_plot_is_the_picture_of_its_settings(twins, axis):
    values, settings, args, job = AXES[axis]
    cells, texts, _ = plot(twins.webui, *args, x=(axis, values), **job)
    alone = [twins.webui.draw(*args, **job) for args in settings]
    assert [cells.index(picture.pixels) for picture in alone] == [cells.index(cell) for cell in cells]
    assert len(set(cells)) > 1 and [ours(text) for text in texts] == [picture.ours for picture in alone]
    assert twins.webui.draw().pixels == twins.without.draw_once().pixels


def test_nothing_leaks_from_cell_to_cell(twins):
    cells, texts, report = plot(twins.webui, HALF, x=("Ratio", "0, 0.5"), y=("Start", "0, 0.5"))
    plain = twins.without.draw_once().pixels
    assert [cell == plain for cell in cells] == [True, False, True, False] and cells[1] != cells[3]
    assert [len(ours(text)) for text in texts] == [0, 1, 0, 1]
    assert [job["merged"] for job in report["jobs"]] == [False, True, False, True] and report["merged"]
    assert "; start=0.5" not in texts[1] and "; start=0.5" in texts[3]


def test_a_cell_that_would_be_unmerged_under_its_label_is_refused(twins):
    start = len(twins.webui.log_text())
    with pytest.raises(urllib.error.HTTPError):
        plot(twins.webui, HALF, x=("Strength", "0.5, 1.5"))
    assert "[ToMe] strength=1.5 is no number from 0 to 1" in twins.webui.log_text(start)
    assert not twins.webui.our_lines(start), "no cell was drawn"
