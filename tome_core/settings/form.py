"""The form: the expert settings as hosts show them, with names, choices, ranges, texts and error messages.

The form is generated from the fields of the settings (`config.setting`). These facts of a field are the form's:

* place: the setting's position in the form. Nodes and lists of values identify settings by position, so a new setting
  takes the next number. A setting without a place is not in the form.
* known_as: its name in the form, if it differs from the keyword; shown: the text of each choice.
* beside_strength: True if a strength does not change the setting.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from operator import itemgetter
from typing import Any, NamedTuple

from .config import GROUPS, WHERE, MergeConfig, describe_settings
from .presets import SD, change_rules, config_of, strength_of_blocks

UNSET = -1.0  # means None, for which sliders and infotexts have no value


class Field(NamedTuple):
    """A setting as users see it in a form: its control, texts and range."""

    name: str  # in the form
    setting: str  # the keyword of `MergeConfig`; "" if it is none
    label: str
    help: str  # the tooltip of the control
    default: Any  # as the control shows it
    group: str = GROUPS[-1]  # the part of the form
    unit: str = ""  # of a number
    choices: tuple[str, ...] = ()  # the text of each choice; empty for numbers and switches
    meanings: tuple[Any, ...] = ()  # the value of each choice, in the same order
    minimum: float | None = None  # of the control; this and the next three are None if the setting is no number
    maximum: float | None = None
    step: float | None = None  # an int allows whole numbers only
    limit: float | None = None  # the highest accepted number, which may be over `maximum`; None: no limit
    may_be_unset: bool = False  # the control's `UNSET` means None
    advanced: bool = False  # users rarely need the setting
    beside_strength: bool = False  # chosen next to a strength, which does not change the setting

    def show(self, value: Any) -> Any:
        """Return what the control shows for a value: a choice's text, a number (`UNSET` for None) or a bool."""
        if self.choices:
            return self.choices[self.meanings.index(value)]
        return UNSET if value is None else value

    def read(self, value: Any) -> Any:
        """Return the setting's value for what the control shows; 2.0 is read as 2 for integers.

        Type and range of a number are not checked. A ValueError is raised if there is no such choice.
        """
        if self.choices:
            if value not in self.choices:
                raise ValueError(f"{self.name}={value!r} is not possible; use one of {', '.join(self.choices)}")
            return self.meanings[self.choices.index(value)]
        if self.may_be_unset and type(value) in (int, float) and value == UNSET:
            return None
        # sliders and pasted texts give whole numbers as 2.0
        is_whole = isinstance(self.step, int) and isinstance(value, float) and value.is_integer()
        return int(value) if is_whole else value


def _field_of(described: Mapping[str, Any]) -> Field:
    """Return the field of a dict of `describe_settings`; if it may be None, `UNSET` is default and minimum."""
    facts = {name: value for name, value in described.items() if name in Field._fields}
    meanings = facts.get("choices", ())
    field = Field(**facts | {"name": described.get("known_as", facts["name"]), "setting": facts["name"]})
    if meanings:
        choices = described.get("shown", meanings)
        return field._replace(choices=choices, meanings=meanings, default=choices[meanings.index(field.default)])
    if field.default is None:
        text = f"{field.help} {UNSET:g} is {described['unset']}."
        field = field._replace(default=UNSET, minimum=UNSET, help=text, may_be_unset=True)
    return field


# no keyword of `MergeConfig`: rules of their own, which other fields do not change
_BLOCKS = Field(
    "whole_blocks", "", "Whole blocks", "SDXL: run most blocks of the coarsest level on fewer tokens, as at this "
    "strength. It gives most of SDXL's gain from 1024 px on. 0 is off.", 0.0, WHERE, "strength", minimum=0.0,
    maximum=1.0, step=0.05, limit=1.0)  # fmt: skip
FIELDS = (*map(_field_of, sorted((one for one in describe_settings() if "place" in one), key=itemgetter("place"))),
          _BLOCKS)  # fmt: skip
NAMES = tuple(item.name for item in FIELDS)


def field(name: str) -> Field:
    """Return the field of this name in the form; raise a ValueError if there is none."""
    return FIELDS[NAMES.index(name)]


def values_of(config: MergeConfig) -> dict[str, Any]:
    """Return what the form shows for a config, by field (`UNSET` for None). Settings of rules are the first rule's."""
    shown = {item.name: item.show(config.value(item.setting)) for item in FIELDS if item.setting}
    return {**shown, _BLOCKS.name: strength_of_blocks(config)}


def values_at(strength: str | float, curve: str = SD) -> dict[str, Any]:
    """Return what the form shows for a strength or a preset's name, by field, without fields `beside_strength`.

    `curve` is one of `presets.CURVE_NAMES`. A ValueError is raised if there is no such strength, preset or curve.
    """
    values = values_of(config_of(strength, curve))
    return {item.name: values[item.name] for item in FIELDS if not item.beside_strength}


def change(config: MergeConfig, values: Mapping[str, Any]) -> MergeConfig:
    """Return a copy of a config that is changed by values of the form.

    A setting of rules changes in every rule but those that "whole_blocks" makes.
    `values` has what controls show, by field; None leaves a setting as it is. A ValueError or a TypeError says in the
    form's names what is not known or not possible.
    """
    unknown = set(values) - set(NAMES)
    if unknown:
        raise ValueError(f"there is no {', '.join(sorted(unknown))} to set; there are: {', '.join(NAMES)}")
    changes = {item.setting: item.read(values[item.name])
               for item in FIELDS if item.setting and values.get(item.name) is not None}  # fmt: skip
    try:
        return change_rules(config, values.get(_BLOCKS.name), **changes)
    except (TypeError, ValueError) as error:
        raise type(error)(_in_the_forms_words(str(error))) from None


def keep_possible(values: Mapping[str, Any]) -> tuple[MergeConfig, list[str]]:
    """Return a config of the values that are possible, and an error text for each value that was left out.

    `values` has what controls show, by field; missing ones, None and unknown names are ignored. A setting whose value
    was left out has its default. Of two settings that contradict each other, the later in the form is left out.
    """
    config, left_out = MergeConfig(), []
    for name in NAMES:
        try:
            config = change(config, {name: values.get(name)})
        except (TypeError, ValueError) as error:
            text = str(error)  # if two settings contradict each other, it may begin with the one that stays
            left_out.append(text if text.startswith(f"{name}=") else f"{name}={values[name]!r}, because {text}")
    return config, left_out


def _in_the_forms_words(text: str) -> str:
    """Write ``keyword=value`` of `MergeConfig` in an error text by names of fields, not labels, and choices' texts."""
    for item in FIELDS[:-1]:
        text = re.sub(rf"\b{item.setting}=", f"{item.name}=", text)
        for choice, meaning in zip(item.choices, item.meanings, strict=True):
            text = text.replace(f"{item.name}={meaning!r}", f"{item.name}={choice!r}")
    return text
