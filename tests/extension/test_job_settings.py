"""A job's settings from each of their sources; a wrong value gets a sentence, counts as no other, and never raises."""

import json
import math
from unittest import mock

import pytest

from tests.host_doubles.webuis import FREE, report
from tests.small_models.unets import ldm_of_one_level, ldm_sdxl
from tome_core import form, preset, strength

SETTINGS = {"tome_enabled": True, "tome_strength": 0.7}
UNGATED = {"only_if_it_pays": False}


def read(webui, curve="sd", **given):
    """The settings of a job with these arguments by name."""
    settings, setting = webui.part("job_settings"), webui.part("settings_tab").default_of
    return settings.read(({"enabled": True, **given},), setting, curve=curve)


def test_arguments_count_by_name_and_by_place(webui):
    by_place = webui.job(True, 0.7, "hires pass", enable_hr=True)
    by_name = webui.job({"enabled": True, "strength": 0.7, "where": "hires pass"}, enable_hr=True)
    assert by_place.latents.equal(by_name.latents) and report(by_place) == report(by_name)
    values = dict.fromkeys(webui.part("job_settings").ARGUMENTS) | {**FREE, "strength": 0.7, "own": True}
    assert webui.job(*values.values()).infotexts == webui.job({**FREE, "strength": 0.7}).infotexts


def test_settings_count_for_what_a_job_does_not_say_and_a_requests_own_for_that_job_alone(webui):
    settings = webui.shared.opts.data
    assert webui.job(UNGATED, override_settings=SETTINGS).infotexts == ["ToMe: 0.7; only_if_it_pays=False"]
    assert webui.job().extra_generation_params == {}, "nothing is left"
    settings |= {**SETTINGS, "tome_where": "first pass"}
    assert webui.job(UNGATED, enable_hr=True).infotexts == ["ToMe: 0.7; first pass; only_if_it_pays=False"]
    assert webui.job({**UNGATED, "strength": 0.2}).infotexts[0].startswith("ToMe: 0.2; first")
    for args in ((False,), (False, 0.5, "everywhere"), ({"enabled": False},)):
        assert webui.job(*args).extra_generation_params == {}


@pytest.mark.parametrize("flavour", ["a1111", "forge"])
def test_the_built_in_merging_is_silent_only_if_ours_merges_and_that_is_told(webui):
    webui.shared.opts.data["token_merging_ratio"] = 0.5
    everywhere = webui.job(FREE, enable_hr=True)
    assert everywhere.built_in == [0, 0] and "Token merging ratio" not in everywhere.infotexts[0]
    assert everywhere.comments.count("the webui's own merging (0.5) is off in this pass") == 2
    hires = webui.job({**FREE, "where": "hires pass"}, enable_hr=True)
    assert hires.built_in == [0.5, 0]
    assert "first pass: the webui's own merging (0.5) stays on; hires pass: the webui's own merging" in hires.comments
    few = webui.job(True, 0.5)
    assert few.built_in == [0.5] and few.infotexts == ["Token merging ratio: 0.5"]
    why = "the picture is so small that merging would not pay"
    assert f"{why}\nToMe: the webui's own merging (0.5) stays on" in few.comments
    for args in ((), (False,), ({**FREE, "strength": 0},), (True, "much")):  # an error takes nothing away
        assert webui.job(*args).built_in == [0.5]


WRONG = [
    ((True,), "is no number from 0 to 1"),  # the request's settings set a strength
    (("yes",), "enabled='yes' is str; use true or false"),
    ((True, 0.5, "hires"), "where='hires' is not possible; use one of everywhere, first pass, hires pass"),
    (({"enabled": True, "ratios": 1},), "there is no ratios to set; there are: enabled, strength, where"),
]


def test_wrong_arguments_are_told_and_the_picture_is_unmerged(webui, log):
    plain = webui.job().latents
    for args, message in WRONG:
        log.clear()
        job = webui.job(*args, override_settings={"tome_strength": 10**400})
        assert message in report(job)["line"] and message in job.comments
        (sentence,) = log
        assert sentence.startswith("not merged, because a setting is wrong: ") and message in sentence
        assert report(job)["merged"] is False and job.latents.equal(plain) and job.infotexts == [""]
        json.dumps(job.extra_generation_params, allow_nan=False)


def test_a_value_that_makes_no_sense_is_left_out_and_named_or_an_error_if_it_is_the_dials(webui):
    for value in (math.inf, math.nan, 10**400, 1e300, "inf", "2", [], {}, b"2"):
        for field in form.FIELDS:
            wish = read(webui, **{field.name: value})
            (sentence,) = wish.left_out
            assert not wish.changes and sentence.startswith(f"{field.name}=")
        for name in webui.part("job_settings").DIAL:
            with pytest.raises((TypeError, ValueError), match=f"{name}="):
                read(webui, **{name: value})


def test_what_does_not_go_together_is_left_out_with_a_sentence_and_the_rest_merges(webui):
    job = webui.job({**FREE, "method": "cluster", "sx": math.inf, "start": 0.8, "end": 0.2})
    assert "not used: sx=inf" in job.comments and "end=0.2, because start=0.8 lies after end=0.2" in job.comments
    assert len(report(job)["not_used"]) == 2 and report(job)["merged"]
    assert job.infotexts == ["ToMe: 0.5; start=0.8; method=cluster; only_if_it_pays=False"]


def test_a_seed_is_the_images_cut_to_the_engines_bits_or_a_given_one_of_those_bits(webui):
    assert read(webui).config(False, seed=2**32 - 1).value("seed") == 2**31 - 1
    assert read(webui, merge_seed=3).config(False, seed=7).value("seed") == 3
    (sentence,) = read(webui, merge_seed=2**32).left_out
    assert sentence.startswith("merge_seed=4294967296 is out of range")


def test_own_settings_keep_a_strengths_whole_blocks_unless_they_are_off(webui):
    for changes, count in (({}, 2), ({"start": 0.1, "merge_seed": 3}, 2), ({"sx": 7}, 2), ({"whole_blocks": 0.0}, 1)):
        config = read(webui, "sdxl", **changes).config(False, curve="sdxl")
        expected = strength(0.5, "sdxl").rules[1:][: count - 1]
        assert [*map(vars, config.rules[1:])] == [*map(vars, expected)], "of the webui's own copy of the engine"
        assert config.start_percent == changes.get("start", 0.0)


OF = {"sd": ldm_of_one_level, "sdxl": ldm_sdxl}


def test_a_refiner_of_another_kind_merges_by_the_curve_of_its_own(webui):
    with mock.patch.object(webui.part("merging"), "patch", wraps=webui.part("merging").patch) as patch:
        webui.job({**FREE, "strength": 0.25}, refiner=ldm_sdxl())
    put_on = [form.values_of(call.args[1]) for call in patch.call_args_list]
    assert put_on == [form.values_of(preset("quality", curve)) | {"merge_seed": 7, **UNGATED} for curve in OF]


@pytest.mark.parametrize(("begun", "curve"), [("sd", "sd"), ("sd", "sdxl"), ("sdxl", "sd")])
def test_what_an_expert_leaves_as_it_was_filled_in_follows_the_model_and_is_no_deviation(webui, begun, curve):
    """A webui makes its page before it loads a model, and the checkpoint may change while the page is open."""
    webui.load(OF[curve]())
    webui.script.ui(False)  # imports the panel
    settings, exact = webui.part("job_settings"), form.values_of(preset("quality", curve))
    job = webui.job(True, 0.25, settings.EVERYWHERE, True, 0.25, *{**settings.base_of(0.25, begun), "sx": 7}.values())
    assert report(job)["settings"] == {"sx": 7}
    written = f"0.25; sx=7; ratio={settings.base_of(0.25, curve)['ratio']}"
    read_again = webui.part("infotext").settings_in(written, curve)
    assert form.values_of(read_again.config(False, curve=curve)) == {**exact, "sx": 7}, "unrounded"
