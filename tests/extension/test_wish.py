"""Strength and where, from whoever says them: arguments by place or name, a request's settings, the settings."""

from __future__ import annotations

import copy
import json

import pytest

from tests.thoroughness import some_quick
from tests.webui_doubles import Processing, report

FREE = {"enabled": True, "only_if_it_pays": False}  # the double's pictures have few tokens


pytestmark = [pytest.mark.usefixtures("small"), pytest.mark.parametrize("flavour", ["a1111", "forge"])]


def test_nothing_is_said_and_nothing_merges_where_nobody_asks(webui):
    done = webui.job()
    assert (done.infotexts, done.comments, done.extra_generation_params) == ([""], "", {})


def test_arguments_count_by_name_and_by_place(webui):
    by_place = webui.job(True, 0.7, "hires pass", enable_hr=True)
    by_name = webui.job({"enabled": True, "strength": 0.7, "where": "hires pass"}, enable_hr=True)
    assert by_place.latents.equal(by_name.latents) and report(by_place) == report(by_name)
    names = webui.part("wish").ARGUMENTS
    assert names[:4] == ("enabled", "strength", "where", "own")
    values = dict.fromkeys(names) | {**FREE, "strength": 0.7, "own": True}
    assert webui.job(*values.values()).infotexts == webui.job({**FREE, "strength": 0.7}).infotexts


def test_a_moved_setting_acts_on_the_next_job_that_does_not_say_otherwise(webui):
    free = {"override_settings": {}}
    webui.shared.opts.data |= {"tome_enabled": True, "tome_strength": 0.7, "tome_where": "first pass"}
    assert report(webui.job())["merged"] is False  # the double's pictures are too small for the gate
    told = webui.job({"only_if_it_pays": False}, enable_hr=True, **free)
    assert told.infotexts == ["ToMe: 0.7; first pass; only_if_it_pays=False"]
    assert webui.job({"strength": 0.2, "only_if_it_pays": False}, **free).infotexts[0].startswith("ToMe: 0.2; first")
    webui.shared.opts.data["tome_strength"] = 0.8
    assert webui.job({"only_if_it_pays": False}).infotexts[0].startswith("ToMe: 0.8")
    assert webui.job(False).extra_generation_params == {}


def test_a_requests_own_settings_hold_for_its_job_alone_and_arguments_outweigh_them(webui):
    own = {"tome_enabled": True, "tome_strength": 0.7}
    free = {"only_if_it_pays": False}
    assert webui.job(free, override_settings=own).infotexts == ["ToMe: 0.7; only_if_it_pays=False"]
    assert webui.job(free).infotexts == [""], "not beyond it"
    assert webui.job({**free, "strength": 0.3}, override_settings=own).infotexts[0].startswith("ToMe: 0.3")
    assert webui.job({"enabled": False}, override_settings=own).extra_generation_params == {}
    assert webui.job().extra_generation_params == {}, "nothing of it is left"


def test_a_page_gives_every_value_so_that_its_panel_is_what_counts(webui):
    webui.shared.opts.data |= {"tome_enabled": True, "tome_strength": 0.7}
    assert webui.job(False, 0.5, "everywhere").extra_generation_params == {}


@pytest.mark.parametrize("case", some_quick([
    ((True, "0.5"), "is no number from 0 to 1"),
    (({"enabled": True, "strength": float("nan")},), "is no number from 0 to 1"),
    ((True,), "is no number from 0 to 1"),  # what the settings of the request say
    (("yes",), "enabled='yes' is str; use true or false"),
    ((1,), "enabled=1 is int"),
    ((True, 0.5, "hires"), "where='hires' is not possible; use one of everywhere, first pass, hires pass"),
    ((True, 0.5, [1]), "where=[1] is not possible"),
    (({"enabled": True, "ratios": 1},), "there is no ratios to set; there are: enabled, strength, where"),
    (({"enabled": True, 1: 1},), "there is no 1 to set"),
    ((True,) + (None,) * 30, "31 values were given; there are 24: enabled, strength"),
], 3))  # fmt: skip
def test_wrong_arguments_are_told_and_the_picture_is_unmerged(webui, case):
    args, message = case
    done = webui.job(*args, override_settings={"tome_strength": 10**400})
    assert message in report(done)["line"] and message in done.comments
    assert report(done)["merged"] is False and done.latents.equal(webui.job().latents) and done.infotexts == [""]
    json.dumps(done.extra_generation_params, allow_nan=False)


def test_what_does_not_go_together_is_left_out_with_a_sentence_and_the_rest_merges(webui):
    done = webui.job({**FREE, "method": "cluster", "sx": float("inf"), "keep": "long"})
    assert "not used: sx=inf" in done.comments and "not used: keep='long'" in done.comments
    assert done.infotexts == ["ToMe: 0.5; method=cluster; only_if_it_pays=False"]
    both = webui.job({**FREE, "start": 0.8, "end": 0.2})
    assert "not used: end=0.2, because start=0.8 lies after end=0.2" in both.comments and report(both)["merged"]


def test_the_built_in_merging_is_silent_only_where_ours_merges_and_that_is_told(webui):
    webui.shared.opts.data["token_merging_ratio"] = 0.5
    off = webui.job(enable_hr=True)
    assert off.built_in == [0.5, 0.5] and "Token merging ratio: 0.5" in off.infotexts[0]
    everywhere = webui.job(FREE, enable_hr=True)
    assert everywhere.built_in == [0, 0] and "Token merging ratio" not in everywhere.infotexts[0]
    assert everywhere.comments.count("the webui's own merging (0.5) is off in this pass") == 2
    hires = webui.job({**FREE, "where": "hires pass"}, enable_hr=True)
    assert hires.built_in == [0.5, 0]
    assert "first pass: left alone; hires pass: " in hires.comments
    assert "first pass: the webui's own merging (0.5) stays on; hires pass: the webui's own merging" in hires.comments
    assert webui.job({**FREE, "strength": 0}).built_in == [0.5]
    assert webui.job(True, "much").built_in == [0.5], "an error is no reason to take what they had"
    few = webui.job(True, 0.5)
    assert few.built_in == [0.5] and few.infotexts == ["Token merging ratio: 0.5"]
    assert "so few tokens that merging would not pay\nToMe: the webui's own merging (0.5) stays on" in few.comments
    assert webui.job().built_in == [0.5]


def test_nothing_leaks_into_a_copy_of_a_job(webui):
    webui.shared.opts.data["token_merging_ratio"] = 0.5
    first = Processing(webui, ({**FREE, "strength": 0.6},))
    webui.process(first)
    cell = copy.copy(first)  # as the plot does it: one dict for all cells
    cell.args = [False]
    done = webui.process(cell)
    assert done.infotexts == ["Token merging ratio: 0.5"] and done.built_in == [0.5]
    assert "ToMe" in first.extra_generation_params
