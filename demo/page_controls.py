"""The page's controls for the form: which component shows each of its fields, and the config that their values make.

Pure but for `make`; a control's value is what gradio gives and takes. Nothing about a single setting is written here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from demo.page_code import change
from tome_core import MergeConfig, form
from tome_core.settings.presets import SD

_FEW = 4  # choices that are all shown; more of them fold into a dropdown
_SLIDES = 1000  # more steps than this and a slider cannot be set


def component(field: form.Field) -> tuple[str, dict[str, Any]]:
    """The gradio component that shows a field, and its arguments apart from value, label and info."""
    if field.choices:
        return ("Radio" if len(field.choices) <= _FEW else "Dropdown"), {"choices": list(field.choices)}
    if isinstance(field.default, bool):
        return "Checkbox", {}
    steps = (field.maximum - field.minimum) / field.step
    if field.may_be_unset or field.limit != field.maximum or steps > _SLIDES:
        return "Number", {"step": field.step}  # no bounds: what is outside is told in the form's words
    return "Slider", {"minimum": field.minimum, "maximum": field.maximum, "step": field.step}


def make(field: form.Field, value: Any) -> Any:
    """The control of a field, showing a value of the form's."""
    import gradio as gr

    kind, arguments = component(field)
    return getattr(gr, kind)(value=value, label=field.label, info=field.help, elem_id=field.name, interactive=True,
                             **arguments)  # fmt: skip


def config_of(values: Mapping[str, Any], by_hand: bool, layout: str = SD) -> MergeConfig:
    """The config of the controls' values, by name: the strength's with what stands beside it, or as set by hand.

    layout: of the model. Raises ValueError, naming the control, the value, the range and the remedy, for what is not
    possible.
    """
    given = {one.name: values[one.name] for one in form.FIELDS if by_hand or one.beside_strength}
    for name, value in given.items():
        if value is None:
            raise ValueError(f"{name}=None is no value; give one such as {form.field(name).default}")
    return change(values["strength"], layout, given)


def find_blamed(message: str) -> tuple[str, ...]:
    """The controls that a message names as ``name=value``: the first, and what it clashes with.

    What stands after the semicolon is the remedy, which may name others.
    """
    named = re.findall(r"\b(\w+)=", message.split("; ")[0])
    return tuple(dict.fromkeys(name for name in named if name in ("strength", *form.NAMES)))
