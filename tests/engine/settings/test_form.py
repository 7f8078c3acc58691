"""The form: an expert's settings in every host, the values that a strength fills in, and refusals in its words."""

from dataclasses import replace
from functools import partial

import pytest

import tome_core
from tome_core import MergeConfig, MergeRule, describe_settings
from tome_core.settings.form import FIELDS, NAMES, change, field, keep_possible, values_at, values_of
from tome_core.settings.presets import MARKS

config_of = partial(change, MergeConfig())


def test_fields_are_in_their_documented_places():
    """Nodes and lists of values know fields by position: a new field between them would shift the later ones."""
    first = ("ratio", "level", "start", "end", "method", "merge_what", "merge_crossattn", "merge_mlp", "sx", "sy",
             "use_rand", "merge_seed", "early_ratio", "early_until", "proportional", "metric", "refine", "keep",
             "only_if_it_pays", "whole_blocks")  # fmt: skip
    assert NAMES[: len(first)] == first


def test_a_field_is_its_setting_in_words_that_a_person_can_choose():
    described = {setting["name"]: setting for setting in describe_settings()}
    for row in FIELDS[:-1]:  # the last, whole_blocks, makes rules
        setting = described[row.setting]
        assert (row.label, row.step, row.maximum) == tuple(setting.get(name) for name in ("label", "step", "maximum"))
        assert row.read(row.default) == setting["default"]
        assert all(type(choice) is str for choice in row.choices) and (not row.choices or row.default in row.choices)
        assert [row.show(row.read(choice)) for choice in row.choices] == list(row.choices)
        assert row.help.startswith(setting["help"]) and row.help.endswith(".") and len(row.help) <= 160, row.help
        unexplained = [choice for choice in row.choices if choice.split()[-1] not in row.help]
        assert not unexplained, row.help


def test_the_defaults_are_the_engines_and_none_need_be_given():
    defaults = {row.name: row.default for row in FIELDS}
    assert config_of(defaults) == config_of({}) == MergeConfig() and values_of(MergeConfig()) == defaults
    assert config_of({"sx": 3.0, "merge_seed": 5.0}) == MergeConfig(sx=3, seed=5), "whole numbers, as sliders have them"
    early = field("early_ratio")
    assert early.default == early.minimum == -1 and early.help.endswith("-1 is the same.")
    assert config_of({"early_ratio": -1}) == config_of({"early_ratio": None}) == MergeConfig()


def test_the_form_can_say_all_of_a_strength_but_its_most_error_and_leaves_the_rest_alone():
    for strength in (0.1, 0.333, *MARKS.values()):
        config = replace(tome_core.strength(strength), max_error=None)
        assert config_of(values_of(config)) == config and keep_possible(values_at(strength)) == (config, [])
    assert set(NAMES) - set(values_at(0.5)) == {"start", "end", "merge_seed"}, (
        "which pictures merge when, and by which seed")  # fmt: skip
    assert values_at("fast") == values_at(MARKS["fast"])
    of_sdxl = tome_core.strength(0.333, "sdxl")
    seeded = replace(of_sdxl.rules[0], seed=3), of_sdxl.rules[1]
    assert change(of_sdxl, {"merge_seed": 3}) == replace(of_sdxl, rules=seeded)
    start = MergeConfig(rules=(MergeRule(ratio=0.75), MergeRule(ratio=0.25)))
    assert change(start, {"start": 0.5}) == MergeConfig(rules=start.rules, start_percent=0.5)


@pytest.mark.parametrize("values, words", [
    ({"merge_seed": -3}, "merge_seed=-3 is out of range; use a whole number from 0 to 2147483647"),
    ({"sx": 2.5}, "sx=2.5 is float"), ({"start": 0.8, "end": 0.2}, "start=0.8 lies after end=0.2; swap them"),
    ({"level": ["7", 0]}, "level=['7', 0] is not possible; use one of automatic, up to /1, up to /2, up to /4"),
    ({"refine": 1, "proportional": False}, "refine=1 may leave groups without tokens"),
    ({"whole_blocks": 1.5}, "whole_blocks=1.5 is no number from 0 to 1; 0 is off"),
    ({"use_rand": "yes"}, "use_rand='yes' is str; use True or False"),
    ({"of_tomorrow": 1}, "there is no of_tomorrow to set; there are: ratio, level")])  # fmt: skip
def test_refusals_are_in_the_forms_words(values, words):
    with pytest.raises((ValueError, TypeError)) as caught:
        config_of(values)
    assert words in str(caught.value)


def test_whole_blocks_are_those_of_a_strength_beside_settings_that_they_do_not_follow():
    for value in (0.0, 0.333333, 0.5, 1.0):
        config = config_of({"whole_blocks": value, "ratio": 0.7, "sx": 4})
        assert config.rules == (MergeRule(ratio=0.7, sx=4), *tome_core.strength(value, "sdxl").rules[1:])
        assert values_of(config)["whole_blocks"] == pytest.approx(value) and change(config, {}) == config
    assert config_of({"whole_blocks": 0.5}).rules[1].merge_blocks and not change(config, {"whole_blocks": 0}).rules[1:]
    alone = MergeConfig(rules=config.rules[1:])
    assert change(alone, {"start": 0.5, "ratio": 0.1}) == replace(alone, start_percent=0.5)


def test_what_does_not_go_together_is_left_out_with_a_sentence_each():
    for values, left in (({"start": 0.9, "end": 0.2, "merge_mlp": True}, ["end"]), ({"sx": 3, "ratio": 1.5}, ["ratio"]),
                         ({"sx": 3, "level": 7}, ["level"]), ({"ratio": 0.3, "of_tomorrow": 1}, [])):  # fmt: skip
        config, said = keep_possible(values)
        assert config == config_of({name: values[name] for name in values if name in NAMES and name not in left})
        assert [text.split("=")[0] for text in said] == left and all("; " in text for text in said)
