"""A real X/Y/Z plot over our settings: each cell is the picture that the same settings give outside of a plot."""

from __future__ import annotations

import pytest

from tests.hosts.webui.running import PAYING

ON = (True, 0.5)
# all that comes before the early ratio
LATER = ("same", 0.5, "automatic", 0.0, 1.0, 0, "bipartite", "automatic", False, False, 2, 2, True, -1)
# axis -> its values as text, the arguments that each stands for, the job
AXES = {
    "Preset": ("off, fast, custom", [(False,), (True, "fast"), ON], PAYING),
    "Early ratio": ("0.25, 0.75", [(*ON, *LATER, one) for one in (0.25, 0.75)], {}),
    "Ratio": ("0, 0.5, 0", [(False,), ON, (False,)], {}),
    "Hires ratio": ("0, 0.25", [(*ON, "own ratio", 0.0), (*ON, "own ratio", 0.25)], {"hires": True}),
    "Method": ("bipartite, downsample", [(*ON, "same", 0.5, "automatic", 0.0, 1.0, 0, one)
                                         for one in ("bipartite", "downsample")], {}),
    "Level": ("automatic, up to /2", [(*ON, "same", 0.5, one) for one in ("automatic", "up to /2")], {}),
    "Start": ("0, 0.5", [(*ON, "same", 0.5, "automatic", one, 1.0) for one in (0.0, 0.5)], {}),
    "End": ("1, 0.5", [(*ON, "same", 0.5, "automatic", 0.0, one) for one in (1.0, 0.5)], {}),
}  # fmt: skip


def plot(webui, *args, x, y=None, **job):
    """The cells, row by row, and their infotexts; x, y: (our axis, values as text)."""
    (info,) = [one["args"] for one in webui.ask("/sdapi/v1/script-info")
               if one["name"] == "x/y/z plot" and not one["is_img2img"]]  # fmt: skip
    choices = next(one["choices"] for one in info if one["label"] == "X type")
    axes = {"X": x, "Y": y, "Z": None}
    types = {f"{letter}_type": choices.index(f"[ToMe] {one[0]}" if one else "Nothing") for letter, one in axes.items()}
    texts = {f"{letter}_values": one[1] if one else "" for letter, one in axes.items()}
    values = webui.values_of("x/y/z plot", **types, **texts, Include_Sub_Images=True,
                             Use_text_inputs_instead_of_dropdowns=True)  # fmt: skip
    done = webui.draw(*args, script_name="x/y/z plot", script_args=values, **job)
    cells = [one for one in done.all if len(one) == min(map(len, done.all))]
    return cells, done.facts["infotexts"][-len(cells) :]


@pytest.mark.parametrize("axis", AXES)
def test_each_cell_is_the_picture_of_its_settings(twins, axis):
    values, settings, job = AXES[axis]
    base = (False, "custom") if axis == "Ratio" else ON
    cells, texts = plot(twins.webui, *base, x=(axis, values), **job)
    alone = [twins.webui.draw(*args, **job) for args in settings]
    assert [cells.index(one.pixels) for one in alone] == [cells.index(one) for one in cells]
    assert len(set(cells)) > 1
    for text, one in zip(texts, alone, strict=True):
        assert _ours(text) == _ours(one.infotext)
    assert twins.webui.draw().pixels == twins.without.draw_once().pixels


def test_two_axes_at_once_and_nothing_leaks_from_cell_to_cell(twins):
    cells, texts = plot(twins.webui, False, "custom", x=("Ratio", "0, 0.5"), y=("Method", "bipartite, downsample"))
    plain = twins.without.draw_once().pixels
    assert [cell == plain for cell in cells] == [True, False, True, False] and cells[1] != cells[3]
    assert [_ours(text) for text in texts] == [
        [], ["ToMe ratio: 0.5", "ToMe method: bipartite"], [], ["ToMe ratio: 0.5", "ToMe method: downsample"]
    ]  # fmt: skip


def _ours(text):
    return [one for one in text.replace("\n", ", ").split(", ") if one.startswith("ToMe")]
