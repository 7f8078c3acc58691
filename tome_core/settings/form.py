"""The form: the expert settings as hosts show them, with names, choices, ranges, texts and error messages.

The form is generated from the fields of the settings (`config.setting`). These facts of a field are the form's:

* place: the setting's position in the form. Nodes and lists of values identify settings by position, so a new setting
  takes the next number. A setting without a place is not in the form.
* known_as: its name in the form, if it differs from the keyword.
* shown: the text of each choice.
* beside_strength: True if a strength does not change the setting.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from operator import itemgetter
from typing import Any, NamedTuple

from .config import GROUPS, MergeConfig, describe_settings
from .presets import SD, config_of

UNSET = -1.0  # means None, for which sliders and infotexts have no value


class Field(NamedTuple):
    """One setting as users see it.

    Args:
        name: in the form.
        setting: the keyword of `MergeConfig`.
        label: of the control.
        help: the tooltip.
        default: as shown.
        group: one of `GROUPS`.
        unit: of a number.
        choices: the texts of the choices; empty for numbers and switches.
        meanings: the value of each choice.
        minimum: of the control.
        maximum: of the control.
        step: of the control; an int allows whole numbers only.
        limit: the highest accepted value; None: no limit.
        may_be_unset: `UNSET` means None.
        advanced: rarely needed.
        beside_strength: a strength does not change the setting.
    """

    name: str
    setting: str
    label: str
    help: str
    default: Any
    group: str = GROUPS[-1]
    unit: str = ""
    choices: tuple[str, ...] = ()
    meanings: tuple[Any, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    step: float | None = None
    limit: float | None = None
    may_be_unset: bool = False
    advanced: bool = False
    beside_strength: bool = False

    def show(self, value: Any) -> Any:
        """Return the shown text or number for a value."""
        if self.choices:
            return self.choices[self.meanings.index(value)]
        return UNSET if value is None else value

    def read(self, value: Any) -> Any:
        """Return the value for a shown text or number.

        Raises:
            ValueError: there is no such choice.
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


_PLACED = (described for described in describe_settings() if "place" in described)
FIELDS = tuple(map(_field_of, sorted(_PLACED, key=itemgetter("place"))))
NAMES = tuple(item.name for item in FIELDS)


def field(name: str) -> Field:
    """Return the field of this name."""
    return FIELDS[NAMES.index(name)]


def values_of(config: MergeConfig) -> dict[str, Any]:
    """Return the shown values of a config, by name; those of the first rule if there are several."""
    return {item.name: item.show(config.value(item.setting)) for item in FIELDS}


def fill(strength: str | float, layout: str = SD) -> dict[str, Any]:
    """Return the shown values of a strength or a preset's name, by name; without settings it does not change."""
    values = values_of(config_of(strength, layout))
    return {item.name: values[item.name] for item in FIELDS if not item.beside_strength}


def change(config: MergeConfig, values: Mapping[str, Any]) -> MergeConfig:
    """Return the config with shown values in place of its own.

    Args:
        config: the settings to change.
        values: by the form's names; None leaves a setting as it is.

    Raises:
        ValueError: a name is not known, or a value is not possible. The text uses the form's names.
        TypeError: a value has the wrong type.
    """
    unknown = set(values) - set(NAMES)
    if unknown:
        raise ValueError(f"there is no {', '.join(sorted(unknown))} to set; there are: {', '.join(NAMES)}")
    changes = {item.setting: item.read(values[item.name]) for item in FIELDS if values.get(item.name) is not None}
    try:
        return replace(config, **changes)
    except (TypeError, ValueError) as error:
        raise type(error)(_in_the_forms_words(str(error))) from None


def settle(values: Mapping[str, Any]) -> tuple[MergeConfig, list[str]]:
    """Return the config of the possible values, and an error text for each value that was left out.

    If two settings contradict each other, the later one is left out, so that choosing another method is no error.
    Missing values, None and unknown names are ignored.
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
    """Replace the engine's names and values in an error text by the form's."""
    for item in FIELDS:
        text = re.sub(rf"\b{item.setting}=", f"{item.name}=", text)
        for choice, meaning in zip(item.choices, item.meanings, strict=True):
            text = text.replace(f"{item.name}={meaning!r}", f"{item.name}={choice!r}")
    return text
