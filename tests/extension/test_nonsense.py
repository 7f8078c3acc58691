"""What is pasted, and what comes through the API, and makes no sense is answered with a sentence.

None of it is taken for something else, and none of it raises where a host would then drop what makes sense beside it.
"""

from __future__ import annotations

import logging
import math

import pytest

from tests.webui_doubles import Processing, Webui
from tome_core import form


@pytest.fixture
def webui(monkeypatch):
    made = Webui(monkeypatch).start()
    yield made
    made.call("script_unloaded")


@pytest.fixture
def log(webui):
    """What our loggers say to the webui's console."""
    told, ours = [], logging.getLogger(webui.part("infotext").__name__.rpartition(".extension")[0])

    class Listener(logging.Handler):
        def emit(self, record):
            told.append(record.getMessage())

    listener = Listener()
    ours.addHandler(listener)
    yield told
    ours.removeHandler(listener)


NO_NUMBERS = ("inf", "-inf", "Infinity", "1e400", "-1e400", "nan", "1" + "0" * 400, "-" + "9" * 400, "1e300", "-7",
              "much", "", "0x10", "2.5.1")  # fmt: skip


def fields(*kinds):
    """The fields of these kinds: number, words."""
    for one in form.FIELDS:
        if ("words" if isinstance(one.default, bool) or one.choices else "number") in kinds:
            yield one


def pasted(webui, part):
    """The changes of a pasted wish, of which a part is this."""
    parameters = {"ToMe": f"0.5; {part}; hires pass"}
    value = webui.part("infotext").Paste().value
    assert value("enabled", parameters) is True and value("where", parameters) == "hires pass", "the rest is pasted"
    return webui.part("infotext").wish_in(parameters["ToMe"], "sd").changes


@pytest.mark.parametrize("text", NO_NUMBERS, ids=lambda text: text[:8])
def test_a_number_that_makes_no_sense_is_ignored_on_paste_and_the_log_says_so(webui, log, text):
    for one in fields("number"):
        log.clear()
        assert one.name not in pasted(webui, f"{one.name}={text}")
        (sentence,) = log
        assert sentence.startswith(f"ToMe: a part of the pasted infotext is ignored: {one.name}=")
        assert "use " in sentence and len(sentence) < 700


@pytest.mark.parametrize("text", ["inf", "maybe", "true", "1"])
def test_a_word_that_makes_no_sense_is_ignored_on_paste_and_the_log_lists_those_that_do(webui, log, text):
    for one in fields("words"):
        log.clear()
        assert one.name not in pasted(webui, f"{one.name}={text}")
        (sentence,) = log
        assert f"ignored: {one.name}='{text}' " in sentence
        assert all(word in sentence for word in one.choices or ("True or False",))


PAST = {"sx": 65, "sy": "100000", "ratio": 1.01, "refine": 4, "early_until": 1001, "merge_seed": 2**32,
        "sx ": "2.5"}  # fmt: skip


@pytest.mark.parametrize("name", PAST)
def test_a_number_past_its_limit_is_ignored_on_paste(webui, log, name):
    assert name.strip() not in pasted(webui, f"{name.strip()}={PAST[name]}")
    assert len(log) == 1 and f"{name.strip()}={PAST[name]}" in log[0]


def test_a_number_at_its_limits_is_pasted(webui, log):
    for one in fields("number"):
        base = webui.part("wish").base_of(0.5)[one.name]
        for value in (one.minimum, one.limit or one.maximum, one.default):
            found = pasted(webui, f"{one.name}={value}")
            # together with the strength's other values an end is not always possible, which is told
            assert found.get(one.name, base) == value or f"{one.name}=" in log[-1]


NO_VALUES = [math.inf, -math.inf, math.nan, 10**400, -(10**400), 1e300, "inf", "2", [], {}, [2], b"2"]


@pytest.mark.parametrize("value", NO_VALUES, ids=lambda value: str(value)[:12])
def test_a_value_of_the_api_that_makes_no_sense_is_left_out_and_named(webui, value):
    read, setting = webui.part("wish").read, webui.part("options").of_dial
    for one in form.FIELDS:
        wish = read(({"enabled": True, one.name: value},), setting)
        assert not wish.changes and len(wish.left_out) == 1 and wish.left_out[0].startswith(f"{one.name}=")


@pytest.mark.parametrize("value", NO_VALUES, ids=lambda value: str(value)[:12])
def test_a_dial_of_the_api_that_makes_no_sense_leaves_the_picture_unmerged_and_the_log_names_it(webui, log, value):
    for name in webui.part("wish").DIAL:
        log.clear()
        p = Processing(webui, ({"enabled": True, name: value},), enable_hr=True)
        webui.hook("before_process", p)
        webui.hook("process", p)
        (sentence,) = log
        assert sentence.startswith("not merged, because a setting is wrong: ") and f"{name}=" in sentence
        assert not webui.errors and not webui.infotext(p)


def test_a_seed_of_the_webuis_is_cut_to_the_engines_bits_and_a_larger_one_that_is_given_is_left_out(webui):
    read, setting = webui.part("wish").read, webui.part("options").of_dial
    assert read((True,), setting).config(False, seed=2**32 - 1).value("seed") == 2**31 - 1
    wish = read(({"enabled": True, "merge_seed": 2**32},), setting)
    assert wish.left_out and wish.left_out[0].startswith("merge_seed=4294967296 is out of range")
