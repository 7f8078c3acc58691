"""A real X/Y/Z plot over our settings: each cell is the picture that the same settings give outside of a plot."""

from __future__ import annotations

import urllib.error

import pytest

from tests.hosts.webui.running import HALF, PAYING, ours
from tests.webui_doubles import custom

# axis -> its values as text, the arguments that each stands for, those of the plot, the job
AXES = {
    "Strength": ("0, 0.5, 0.7", [(True, 0), (True, 0.5), (True, 0.7)], (False,), PAYING),
    "Where": ("first pass, hires pass", [({**HALF, "where": one},) for one in ("first pass", "hires pass")], (HALF,),
              {"hires": True}),
    "Early ratio": ("0.25, 0.75", [(custom(early_ratio=one),) for one in (0.25, 0.75)], (HALF,), {}),
    "Ratio": ("0, 0.5, 0", [(custom(one),) for one in (0.0, 0.5, 0.0)], (HALF,), {}),
    "Method": ("bipartite, cluster", [(custom(method=one),) for one in ("bipartite", "cluster")], (HALF,), {}),
    "Level": ("automatic, up to /2", [(custom(level=one),) for one in ("automatic", "up to /2")], (HALF,), {}),
    "Start": ("0, 0.5", [(custom(start=one),) for one in (0.0, 0.5)], (HALF,), {}),
    "End": ("1, 0.5", [(custom(end=one),) for one in (1.0, 0.5)], (HALF,), {}),
}  # fmt: skip


def plot(webui, *args, x, y=None, **job):
    """The cells, row by row, their infotexts, and the report; x, y: (our axis, values as text)."""
    info = webui.info_of("x/y/z plot")
    choices = next(one["choices"] for one in info["args"] if one["label"] == "X type")
    axes = {"X": x, "Y": y, "Z": None}
    types = {f"{letter}_type": choices.index(f"[ToMe] {one[0]}" if one else "Nothing") for letter, one in axes.items()}
    texts = {f"{letter}_values": one[1] if one else "" for letter, one in axes.items()}
    values = webui.values_of("x/y/z plot", **types, **texts, Include_Sub_Images=True,
                             Use_text_inputs_instead_of_dropdowns=True)  # fmt: skip
    done = webui.draw(*args, script_name="x/y/z plot", script_args=values, **job)
    cells = [one for one in done.all if len(one) == min(map(len, done.all))]
    return cells, done.facts["infotexts"][-len(cells) :], done.report


@pytest.mark.parametrize("axis", AXES)
def test_each_cell_is_the_picture_of_its_settings(twins, axis):
    values, settings, base, job = AXES[axis]
    cells, texts, _ = plot(twins.webui, *base, x=(axis, values), **job)
    alone = [twins.webui.draw(*args, **job) for args in settings]
    assert [cells.index(one.pixels) for one in alone] == [cells.index(one) for one in cells]
    assert len(set(cells)) > 1
    for text, one in zip(texts, alone, strict=True):
        assert ours(text) == one.ours
    assert twins.webui.draw().pixels == twins.without.draw_once().pixels


def test_two_axes_at_once_and_nothing_leaks_from_cell_to_cell(twins):
    cells, texts, told = plot(twins.webui, HALF, x=("Ratio", "0, 0.5"), y=("Start", "0, 0.5"))
    plain = twins.without.draw_once().pixels
    assert [cell == plain for cell in cells] == [True, False, True, False] and cells[1] != cells[3]
    assert [len(ours(text)) for text in texts] == [0, 1, 0, 1]
    assert [one["merged"] for one in told["jobs"]] == [False, True, False, True] and told["merged"]
    assert "; start=0.5" not in texts[1] and "; start=0.5" in texts[3]


def test_what_would_be_drawn_unmerged_under_its_label_is_refused(twins):
    start = len(twins.webui.said())
    with pytest.raises(urllib.error.HTTPError):
        plot(twins.webui, HALF, x=("Strength", "0.5, 1.5"))
    assert "[ToMe] strength=1.5 is no number from 0 to 1" in twins.webui.said(start)
    assert not twins.webui.told(start), "no cell was drawn"
    assert twins.webui.draw().pixels == twins.without.draw_once().pixels
