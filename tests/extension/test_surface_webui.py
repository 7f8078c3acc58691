"""What a power user of a webui met when an earlier panel was tried, each as a law: one numbered test for one fault."""

from __future__ import annotations

import pytest

from tests.webui_doubles import Webui
from tome_core import form
from tome_core.settings.presets import MARKS

ON = {"enabled": True, "only_if_it_pays": False}  # the double's pictures have few tokens


@pytest.fixture
def webui(monkeypatch):
    made = Webui(monkeypatch).start()
    yield made
    assert not made.errors
    made.call("script_unloaded")


def report(done):
    return done.extra_generation_params["ToMe report"]


def wish(webui, **given):
    return webui.part("wish").read(({"enabled": True, **given},), webui.part("options").of_dial)


def test_1_the_control_drives_every_step_and_there_is_no_cliff_above_0(webui):
    def saved(strength):
        return report(webui.job({**ON, "strength": strength}))["passes"]["first pass"]["work_saved"]

    found = [saved(one) for one in (0.01, 0.25, 0.5, 0.75, 1.0)]
    assert found == sorted(set(found)), "each cell of a plot differs from the others"
    assert found[0] <= 1 / 4, "one of four steps, which is as little as there is"


@pytest.mark.parametrize("strength", MARKS.values(), ids=MARKS)
def test_2_no_choice_is_refused_beside_any_strength(webui, strength):
    for one in form.FIELDS:
        for value in one.choices or ((True, False) if isinstance(one.default, bool) else ()):
            found = wish(webui, strength=strength, **{one.name: value})
            assert found.config(False) is not None and not found.left_out, (one.name, value)
            shown = {**webui.part("wish").base_of(strength), **found.changes}
            assert shown[one.name] == value, "what was clicked counts"


def test_3_the_built_in_merging_is_kept_where_ours_merges_nothing_and_both_are_told(webui):
    webui.shared.opts.data["token_merging_ratio"] = 0.5
    few = webui.job(True)
    assert few.built_in == [0.5] and "the webui's own merging (0.5) stays on" in few.comments
    merged = webui.job(ON)
    assert merged.built_in == [0] and "the webui's own merging (0.5) is silent in this pass" in merged.comments


@pytest.mark.parametrize("given", [{"only_if_it_pays": True}, {"start": 0.99}, {"min_pixels": 10**6}], ids=str)
def test_4_a_picture_equal_to_plain_claims_nothing(webui, given):
    done = webui.job({**ON, **given})
    assert done.latents.equal(webui.job().latents) and done.infotexts == [""]
    assert report(done)["merged"] is False


@pytest.mark.slow
@pytest.mark.parametrize(("args", "reason"), [
    (({**ON, "start": 0.99},), "outside the rules' time range"), ((True,), "so few tokens"),
    ((True, 2), "strength=2 is no number"), ((True, 0), "strength 0"),
    ((True, 0.5, "hires pass"), "only the hires pass is to merge"),
], ids=str)  # fmt: skip
def test_5_api_callers_are_told_why_nothing_merged(webui, args, reason):
    assert reason in report(webui.job(*args))["line"]


def test_6_quicksettings_and_a_requests_own_settings_act_and_the_latter_on_their_job_alone(webui):
    own = {"tome_enabled": True, "tome_strength": 0.7}
    free = {"only_if_it_pays": False}
    assert webui.job(free, override_settings=own).infotexts == ["ToMe: 0.7 v1; only_if_it_pays=False"]
    assert webui.job(free).infotexts == [""], "not beyond it"
    webui.shared.opts.data |= own
    assert webui.job(free).infotexts == ["ToMe: 0.7 v1; only_if_it_pays=False"]
    assert webui.job({**free, "strength": 0.2}).infotexts[0].startswith("ToMe: 0.2 v1")
    controls = webui.script.ui(False)
    assert [one.get_config()["value"] for one in controls[:2]] == [True, 0.7]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "values"), [("keep", (30, 30.0)), ("strength", (1, 1.0)), ("sx", (3, 3.0))])
def test_7_one_key_whose_text_is_the_same_from_page_and_api(webui, name, values):
    texts = {webui.job({**ON, name: value}).infotexts[0] for value in values}
    assert len(texts) == 1 and texts.pop().count("ToMe") == 1
