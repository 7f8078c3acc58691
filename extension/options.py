"""The settings tab: section "Token Merging (ToMe)", keys `tomecore_*`. Readable before, and without, the tab."""

from __future__ import annotations

from typing import Any

from . import host
from .settings import FIELDS, UNSET, Field, preset_values

SECTION = ("tome_core", "Token Merging (ToMe)")
_HIRES_ONLY = ("hires", "hires_ratio")  # img2img has no hires pass
_PRESET_HELP = (
    "What the panel starts with. All but custom and off outweigh the defaults below, except those for the hires pass, "
    "the smallest picture and the destination seed."
)
_LARGEST = 2**53  # that a page can hold
CONSOLE, NOTE, MAP, MEASURE = "tomecore_console", "tomecore_note", "tomecore_map", "tomecore_measure"
_SWITCHES = (
    (CONSOLE, True, "Show the report in the console",
     "one line after each job: levels, tokens before and after, steps, attention saved"),
    (NOTE, True, "Show the report under the picture", "the same line, below its generation parameters"),
    (MAP, False, "Draw the merge map beside the result",
     "one more picture in the gallery: what merged into what in the last step"),
    (MEASURE, False, "Measure whether merging pays on this machine",
     "after the first picture of each size and setting, by some 36 more calls of the model; Only where it pays follows "
     "what was found, from the next picture on"),
)  # fmt: skip


def key_of(one: Field, is_img2img: bool) -> str:
    """The saved setting that holds a field's default in a tab."""
    return f"tomecore_{'img2img_' if is_img2img else ''}{one.name}"


def fields_of(is_img2img: bool) -> list[Field]:
    """The fields that a tab shows."""
    return [one for one in FIELDS if not (is_img2img and one.name in _HIRES_ONLY)]


def default_of(one: Field, is_img2img: bool) -> Any:
    """The user's default of a field; the engine's where there is none, or none that makes sense."""
    value = host.option(key_of(one, is_img2img), one.default)
    if one.choices:
        return value if value in one.choices else one.default
    if isinstance(one.default, bool):
        return value if isinstance(value, bool) else one.default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not -_LARGEST < value < _LARGEST:
        return one.default
    return type(one.default)(value)


def shown(is_img2img: bool) -> dict[str, Any]:
    """What a tab's panel starts with, by name: the user's defaults, and over them what their preset fills in."""
    values = {one.name: default_of(one, is_img2img) for one in FIELDS}
    return {**values, **preset_values(values["preset"])}


def is_on(key: str) -> bool:
    """One of the switches `CONSOLE`, `NOTE`, `MAP` and `MEASURE`."""
    return bool(host.option(key, next(default for name, default, *_ in _SWITCHES if name == key)))


def register() -> None:
    """Put the section into the settings tab."""
    for key, default, label, help in _SWITCHES:
        host.add_option(key, default, label, help, SECTION)
    for is_img2img in (False, True):
        for one in fields_of(is_img2img):
            _register_default(one, is_img2img)


def _register_default(one: Field, is_img2img: bool) -> None:
    label = "On by default" if one.name == "enabled" else f"Default: {one.label}"
    if is_img2img:
        label = f"img2img: {label[0].lower()}{label[1:]}"
    help = _PRESET_HELP if one.name == "preset" else one.help
    component, arguments = component_name(one), arguments_of(one)
    host.add_option(key_of(one, is_img2img), one.default, label, help, SECTION, component, **arguments)


def component_name(one: Field) -> str:
    """The gradio component that shows a field."""
    if one.choices:
        return "Radio" if len(one.choices) < 5 or one.name == "preset" else "Dropdown"
    if isinstance(one.default, bool):
        return "Checkbox"
    return "Slider" if one.maximum is not None and one.name != "seed" and one.default != UNSET else "Number"


def arguments_of(one: Field) -> dict[str, Any]:
    """The arguments of that component, apart from value and label."""
    name = component_name(one)
    if name in ("Radio", "Dropdown"):
        return {"choices": list(one.choices)}
    if name == "Slider":
        return {"minimum": one.minimum, "maximum": one.maximum, "step": one.step}
    return {"precision": 0} if name == "Number" and isinstance(one.default, int) else {}
