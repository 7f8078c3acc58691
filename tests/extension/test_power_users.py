"""What a power user of a webui met when an earlier panel was tried, each as a law."""

from __future__ import annotations

import pytest

from tests.webui_doubles import report
from tome_core import form
from tome_core.settings.presets import MARKS

ON = {"enabled": True, "only_if_it_pays": False}  # the double's pictures have few tokens


def wish(webui, **given):
    return webui.part("wish").read(({"enabled": True, **given},), webui.part("options").of_dial)


def test_the_control_drives_every_step_and_there_is_no_cliff_above_0(webui):
    def saved(strength):
        return report(webui.job({**ON, "strength": strength}))["passes"]["first pass"]["work_saved"]

    found = [saved(one) for one in (0.01, 0.25, 0.5, 0.75, 1.0)]
    assert found == sorted(set(found)), "each cell of a plot differs from the others"
    assert found[0] <= 1 / 4, "one of four steps, which is as little as there is"


@pytest.mark.parametrize("strength", MARKS.values(), ids=MARKS)
def test_no_choice_is_refused_beside_any_strength(webui, strength):
    for one in form.FIELDS:
        for value in one.choices or ((True, False) if isinstance(one.default, bool) else ()):
            found = wish(webui, strength=strength, **{one.name: value})
            assert found.config(False) is not None and not found.left_out, (one.name, value)
            shown = {**webui.part("wish").base_of(strength), **found.changes}
            assert shown[one.name] == value, "what was clicked counts"


@pytest.mark.parametrize(("given", "why"), [
    ({"only_if_it_pays": True}, "so few tokens"), ({"start": 0.99}, "outside the rules' time range"),
    ({"strength": 0}, "strength 0, left alone"),
    ({"where": "hires pass"}, "left alone, because only the hires pass is to merge, and there is none"),
], ids=str)  # fmt: skip
def test_a_picture_equal_to_plain_claims_nothing_and_says_why(webui, given, why):
    done = webui.job({**ON, **given})
    assert done.latents.equal(webui.job().latents) and done.infotexts == [""]
    assert report(done)["merged"] is False and why in report(done)["line"]
