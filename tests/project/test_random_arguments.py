"""Random arguments through every door give a picture or a message that names what is wrong, and nothing in between.

The doors: the engine's functions, the nodes as ComfyUI's queue calls them and with raw values, the webui's API. Whole
numbers stop at 2**1000; past the largest float, see `HUGE`.
"""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tome_core
from comfy_nodes import host
from comfy_nodes.inputs import SETTINGS, TIMES
from comfy_nodes.nodes import ApplyToMe, ToMeSettings
from tests import webui_doubles
from tests.comfy_doubles import Guider, ModelPatcher, Server, least_checkpoint, queued
from tests.models import call_unet, inputs, sd15
from tests.random_settings import DESCRIBED
from tests.thoroughness import PROFILE
from tests.traces import traces
from tests.webui_doubles import FLAVOURS, Webui, merges
from tome_core import MergeConfig, MergeRule, form

HUGE = 2**1000
APPLY_PATCH = set(inspect.signature(tome_core.apply_patch).parameters) - {"model"}

whole = st.one_of(st.integers(-3, 70), st.integers(-HUGE, HUGE), st.sampled_from([2**31 - 1, 2**31, 2**63, 2**64]))
json_scalars = st.one_of(st.none(), st.booleans(), whole, st.floats(), st.text(max_size=8))
json_values = st.one_of(
    json_scalars, st.lists(json_scalars, max_size=3), st.dictionaries(st.text(max_size=3), json_scalars, max_size=2),
)  # fmt: skip
python_values = st.one_of(
    json_values, st.binary(max_size=3), st.complex_numbers(), st.tuples(whole), st.fractions(),
    st.builds(object), st.just(MergeRule), st.just(range(2)),
)  # fmt: skip


def possible(setting: dict[str, Any]) -> st.SearchStrategy:
    """Values of a setting that are right by themselves."""
    unset = st.none() if setting["default"] is None else st.nothing()
    if "choices" in setting:
        return st.sampled_from(setting["choices"])
    if isinstance(setting["default"], bool):
        return st.booleans()
    low, high = setting["minimum"], setting["maximum"]
    if isinstance(setting["step"], int):
        return st.integers(low, high if setting["limit"] == high else min(high, 16))
    return unset | st.floats(low, high) | st.sampled_from([low, high])


def some_of(possible_values: dict[str, st.SearchStrategy], anything: st.SearchStrategy) -> st.SearchStrategy:
    """Some settings, right each by itself; now and then one or two of them with any value at all."""
    right = st.fixed_dictionaries({}, optional=possible_values)
    wrong = st.dictionaries(st.sampled_from(sorted(possible_values)), anything, max_size=2)
    return st.builds(lambda one, other: {**one, **other}, right, wrong | st.just({}))


class Seen(Counter):
    """What became of the cases; printed, because a law that only ever met one of both outcomes says little."""

    def told(self, capsys: Any, door: str) -> None:
        with capsys.disabled():
            print(f"\n  {door}: {', '.join(f'{count} {what}' for what, count in sorted(self.items()))} ", end="")
        assert self["pictures"] > 20 and self["refusals"] > 20


def names_one_of(text: str, values: dict[str, Any]) -> bool:
    """Does a message say which of these values it does not take, as ``name=value``?"""
    return any(f"{name}={value!r}" in text for name, value in values.items())


# --- the engine ------------------------------------------------------------------------------------------------------

calls = st.tuples(
    st.sampled_from([(8, 8), (5, 7), (2, 8), (1, 1)]), st.integers(1, 2), st.sampled_from([0, 10, 500.5, 999])
)


@functools.cache
def unet() -> SimpleNamespace:
    model = sd15()
    return SimpleNamespace(model=model, before=traces(model))


def picture(size: tuple[int, int], batch: int, timestep: float) -> torch.Tensor:
    x, text = inputs(4, batch, *size)
    with torch.no_grad():
        return call_unet(unet().model, x, timestep, text)


plain = functools.cache(picture)


def draw(call: tuple, door: Any, values: dict[str, Any], seen: Seen) -> None:
    """One case: a picture by the door, or a message."""
    model, expected = unet().model, plain(*call)
    try:
        door(model, values)
    except (ValueError, TypeError) as error:
        assert names_one_of(str(error), values), (error, values)
        assert not merges(model)
        seen["refusals"] += 1
        return
    try:
        out = picture(*call)
        assert out.shape == expected.shape and out.isfinite().all()
        assert tome_core.report(model).merged_anything or torch.equal(out, expected)
    finally:
        tome_core.remove_patch(model)
    assert not merges(model)
    seen["pictures"] += 1


def by_config(model: Any, values: dict[str, Any]) -> None:
    tome_core.patch(model, MergeConfig(**values))


def by_rules(model: Any, values: dict[str, Any]) -> None:
    last = MergeConfig(**values)
    tome_core.patch(model, replace(last, rules=[MergeRule(ratio=0.25, min_timestep=400), *last.rules]))


def by_apply_patch(model: Any, values: dict[str, Any]) -> None:
    tome_core.apply_patch(model, **{name: value for name, value in values.items() if name in APPLY_PATCH})


@pytest.mark.slow
def test_any_settings_give_a_picture_or_a_message(capsys):
    seen = Seen()
    doors = st.sampled_from([by_config, by_rules, by_apply_patch])

    @PROFILE
    @given(some_of({name: possible(one) for name, one in DESCRIBED.items()}, python_values), calls, doors)
    def law(values, call, door):
        draw(call, door, values, seen)

    law()
    assert traces(unet().model) == unet().before
    seen.told(capsys, "the engine's functions")


@PROFILE
@given(python_values.filter(lambda one: one is not None))
def test_what_is_no_config_and_what_is_no_model_is_named(value):
    model = unet().model
    if isinstance(value, str):
        with pytest.raises(ValueError, match=r"preset=.*use one of"):
            tome_core.patch(model, value)
    else:
        with pytest.raises(TypeError, match=f"config is {type(value).__name__}"):
            tome_core.patch(model, value)
    with pytest.raises(TypeError, match=f"model is {type(value).__name__}"):
        tome_core.patch(value)
    assert not merges(model)


# --- ComfyUI ---------------------------------------------------------------------------------------------------------


def possible_in(name: str) -> st.SearchStrategy:
    """Values of a field of the form that are right by themselves."""
    return possible(DESCRIBED[form.field(name).setting])


node_values = {
    name: st.sampled_from(form.field(name).choices) if form.field(name).choices else possible_in(name)
    for name in SETTINGS
}
raw_values = json_values | st.tuples(st.sampled_from(["4", "12"]), st.integers(0, 1)).map(list)


@functools.cache
def comfy() -> SimpleNamespace:
    patcher = least_checkpoint()
    before = traces(patcher.model)
    return SimpleNamespace(patcher=patcher, before=before, plain=sampled(patcher))


def sampled(patcher: ModelPatcher) -> torch.Tensor:
    return Guider(patcher).sample(steps=1, size=(8, 8))


dials = {"strength": st.floats(0, 1), **{name: possible_in(name) for name in TIMES}}


def run(server: Server, dials: dict[str, Any], settings: dict[str, Any] | None) -> str:
    """What ApplyToMe said last, where both nodes with these values give a picture."""
    linked = {} if settings is None else {"settings": ToMeSettings().settings(unique_id="6", **settings)[0]}
    server.texts.clear()
    applied = ApplyToMe().apply(comfy().patcher, unique_id="5", **dials, **linked)[0]
    out = sampled(applied)
    assert out.shape == comfy().plain.shape and out.isfinite().all() and not merges(comfy().patcher.model)
    text = server.texts[-1][1]
    is_plain = host.find_attached(applied) is None or "nothing merged" in text
    assert not is_plain or torch.equal(out, comfy().plain)
    return text


def by_queue(server: Server, own: dict[str, Any], settings: dict[str, Any] | None) -> str:
    own, marked = queued(ApplyToMe, {"model": "a model", **own})
    own.pop("model")
    turned, marked_there = (None, []) if settings is None else queued(ToMeSettings, settings)
    if marked or marked_there:
        assert set(marked) <= set(own) and set(marked_there) <= set(settings or ())
        return "refusals"
    run(server, own, turned)
    return "pictures"


def by_call(server: Server, own: dict[str, Any], settings: dict[str, Any] | None) -> str:
    """Linked values come as they are, and scripts call nodes as they like."""
    text = run(server, own, settings)
    if "the model is unchanged" not in text or "ToMe is off" in text:
        return "pictures"
    assert names_one_of(text, own), (text, own)
    return "refusals"


@pytest.mark.parametrize(("door", "values"), [(by_queue, json_scalars), (by_call, raw_values)], ids=["queue", "call"])
def test_any_values_of_the_nodes_give_a_picture_or_a_message(door, values, server, capsys):
    seen = Seen()

    @PROFILE
    @given(some_of(dials, values), st.none() | some_of(node_values, values))
    def law(own, settings):
        seen[door(server, own, settings)] += 1

    law()
    assert traces(comfy().patcher.model) == comfy().before
    seen.told(capsys, f"values of the nodes, {door.__name__}")


# --- the webuis ------------------------------------------------------------------------------------------------------


def api_values(wish: Any) -> dict[str, st.SearchStrategy]:
    """For each of the API's arguments, in order, values that are right by themselves."""
    share = st.floats(0, 1)
    found = {"enabled": st.booleans() | st.just(True), "strength": share, "where": st.sampled_from(wish.WHERE),
             wish.OWN: st.booleans(), wish.FILLED_FOR: share}  # fmt: skip
    for one in form.FIELDS:
        found[one.name] = st.sampled_from(one.choices) if one.choices else possible(DESCRIBED[one.setting])
    assert tuple(found) == wish.ARGUMENTS
    return found


@st.composite
def api_args(draw, arguments):
    """What an API caller writes, by place or by name: as much as it likes, mostly right."""
    names = [*arguments]
    by_name = draw(st.booleans())
    given = draw(st.lists(st.sampled_from(names), unique=True))
    given = given if by_name else names[: len(given)]
    values = {name: draw(arguments[name]) for name in given}
    for name in draw(st.lists(st.sampled_from(given), max_size=2)) if given else ():
        values[name] = draw(json_values)
    if by_name:
        return [values | draw(st.just({}) | st.dictionaries(st.text(max_size=3), json_values, max_size=1))]
    more = st.lists(json_values, max_size=1) if len(values) == len(names) else st.just([])
    return [*values.values(), *draw(more)]


@pytest.mark.slow
@pytest.mark.parametrize("flavour", FLAVOURS[:1] if PROFILE.max_examples < 1000 else FLAVOURS[1:2])
def test_any_arguments_of_the_api_give_a_picture_or_a_message(flavour, monkeypatch, capsys):
    webui_doubles.be_short(monkeypatch, slice(1))
    webui = Webui(monkeypatch, flavour).start()
    before, seen = traces(webui.unet), Seen()
    options, wish = webui.part("options"), webui.part("wish")
    webui.shared.opts.data[options.REPORT] = options.PAGE
    plain = {hires: webui.job(False, enable_hr=hires).latents for hires in (False, True)}

    @PROFILE
    @given(api_args(api_values(wish)), st.booleans())
    def law(args, hires):
        done = webui.job(*args, enable_hr=hires)
        assert not webui.errors and not merges(webui.unet), (webui.errors, args)
        told = done.extra_generation_params.get("ToMe report", {"line": ""})["line"]
        named = args[0] if args and isinstance(args[0], dict) else dict(zip(wish.ARGUMENTS, args, strict=False))
        if told.startswith("not merged, because a setting is wrong: "):
            assert torch.equal(done.latents, plain[hires]), "a refused job is merged"
            is_long = len(args) > len(wish.ARGUMENTS) and str(len(args)) in told
            assert is_long or names_one_of(told, named) or any(f"there is no {name}" in told for name in named), (
                told, args)  # fmt: skip
            assert told in done.comments
            seen["refusals"] += 1
            return
        assert done.latents.shape == plain[hires].shape and done.latents.isfinite().all()
        seen["pictures"] += 1

    law()
    assert traces(webui.unet) == before
    webui.call("script_unloaded")
    seen.told(capsys, f"arguments of the API ({flavour})")
