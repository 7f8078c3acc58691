"""The page's controls: which component shows each of the engine's settings, and the config that their values make.

Pure but for `make`; a control's value is what gradio gives and takes. Nothing about a single setting is written here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tome_core import PRESETS, MergeConfig, describe_settings, preset

SETTINGS: dict[str, dict[str, Any]] = {one["name"]: one for one in describe_settings()}
NAMES = tuple(SETTINGS)
BASIC = tuple(name for name in NAMES if not SETTINGS[name].get("advanced"))
ADVANCED = tuple(name for name in NAMES if SETTINGS[name].get("advanced"))
CUSTOM = "Custom"
PRESET_OF = {name.capitalize(): name for name in PRESETS}
CHOICES = (*PRESET_OF, CUSTOM)
_FEW = 4  # choices that are all shown; more of them fold into a dropdown
_SLIDES = 1000  # more steps than this and a slider cannot be set


def component(name: str) -> tuple[str, dict[str, Any]]:
    """The gradio component that shows a setting, and its arguments apart from value, label and info."""
    setting = SETTINGS[name]
    default = setting["default"]
    if "choices" in setting:
        choices = [shown(name, choice) for choice in setting["choices"]]
        return ("Radio" if len(choices) <= _FEW else "Dropdown"), {"choices": choices}
    if isinstance(default, bool):
        return "Checkbox", {}
    if "minimum" not in setting:
        return "Textbox", {"placeholder": _unset(name)}
    steps = (setting["maximum"] - setting["minimum"]) / setting["step"]
    if default is None or "limit" in setting or "open_ended" in setting or steps > _SLIDES:
        # no bounds: what is outside is told in the engine's words
        return "Number", {"step": setting["step"]} | ({"placeholder": _unset(name)} if default is None else {})
    return "Slider", {key: setting[key] for key in ("minimum", "maximum", "step")}


def make(name: str, value: Any, **more: Any) -> Any:
    """The control of a setting, showing this `value`."""
    import gradio as gr

    kind, arguments = component(name)
    setting = SETTINGS[name]
    return getattr(gr, kind)(value=shown(name, value), label=setting["label"], info=setting["help"],
                             elem_id=name, interactive=True, **arguments, **more)  # fmt: skip


def shown(name: str, value: Any) -> Any:
    """A setting's value as its control has it: words instead of None, "0, 1" instead of a tuple."""
    setting = SETTINGS[name]
    if "choices" in setting:
        return _unset(name) if value is None else str(value)
    if "minimum" not in setting and not isinstance(setting["default"], bool):
        return "" if value is None else ", ".join(map(str, value))
    return value


def taken(name: str, value: Any) -> Any:
    """A control's value as a config takes it; what makes no sense stays as it is, for the engine to refuse."""
    setting = SETTINGS[name]
    if "choices" in setting:
        return next((choice for choice in setting["choices"] if shown(name, choice) == value), value)
    if isinstance(value, str):
        return _taken_text(value.strip(), is_list="minimum" not in setting)
    whole = isinstance(setting.get("step"), int)
    return int(value) if whole and isinstance(value, float) and value.is_integer() else value


def _taken_text(text: str, is_list: bool) -> Any:
    if not text:
        return None
    parts = re.split(r"[,\s]+", text)
    if not is_list or not all(part.isdecimal() for part in parts):
        return text
    return tuple(int(part) for part in parts)


def _unset(name: str) -> str:
    return SETTINGS[name].get("unset", "automatic")


def config_of(values: Mapping[str, Any]) -> MergeConfig:
    """The config of the controls' values, by name. Raises ValueError, in the engine's words, for what is none."""
    try:
        return MergeConfig(**{name: taken(name, values[name]) for name in NAMES})
    except TypeError as error:
        raise ValueError(str(error)) from None


def values_of(config: MergeConfig) -> dict[str, Any]:
    """What the controls show for a config."""
    return {name: shown(name, config.value(name)) for name in NAMES}


def preset_of(config: MergeConfig) -> str:
    """The choice that stands for exactly this config, else Custom."""
    return next((label for label, name in PRESET_OF.items() if preset(name) == config), CUSTOM)


def blamed(message: str) -> tuple[str, ...]:
    """The settings that a message of the engine names as ``name=value``: the first, and what it clashes with.

    What stands after the semicolon is the remedy, which may name others.
    """
    named = re.findall(r"\b(\w+)=", message.split("; ")[0])
    return tuple(dict.fromkeys(name for name in named if name in SETTINGS))
