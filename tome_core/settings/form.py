"""What an expert sets, in every host: names, choices, ranges, texts, what a strength fills in, refusals in these words.

Made from what each setting says of itself (`setting`), so that a new one is written in one place. Of its facts these
are the form's: place, its number in the form (nodes and lists of values know settings by position, so a new one takes
the next number; without a place Python alone knows the setting); known_as, its name here, where the keyword is another;
shown, what people read for each of the choices; beside_strength, true where a strength leaves it as it is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from operator import itemgetter
from typing import Any, NamedTuple

from .config import GROUPS, MergeConfig, describe_settings
from .presets import SD, config_of

UNSET = -1.0  # a number's way to say None, which neither a slider nor an infotext can


class Field(NamedTuple):
    """One setting as people see it. name: theirs for it; setting: the engine's.

    choices, meanings: what people read and what the engine takes for each; empty where anything in a range goes.
    minimum, maximum, step: of a control; a whole step allows whole numbers alone. limit: the most that is taken; None:
    there is none. may_be_unset: `UNSET` is None. advanced: rarely wanted. beside_strength: a strength leaves it. group:
    what it is about, of `GROUPS`; unit: of its number.
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
        """What people read for a value of the engine."""
        if self.choices:
            return self.choices[self.meanings.index(value)]
        return UNSET if value is None else value

    def read(self, value: Any) -> Any:
        """What the engine takes for a value that people gave. Raises ValueError for what is no choice."""
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
    own = Field(**facts | {"name": described.get("known_as", facts["name"]), "setting": facts["name"]})
    if meanings:
        choices = described.get("shown", meanings)
        return own._replace(choices=choices, meanings=meanings, default=choices[meanings.index(own.default)])
    if own.default is None:
        text = f"{own.help} {UNSET:g} is {described['unset']}."
        own = own._replace(default=UNSET, minimum=UNSET, help=text, may_be_unset=True)
    return own


FIELDS = tuple(map(_field_of, sorted((one for one in describe_settings() if "place" in one), key=itemgetter("place"))))
NAMES = tuple(one.name for one in FIELDS)


def field(name: str) -> Field:
    """The field of this name."""
    return FIELDS[NAMES.index(name)]


def values_of(config: MergeConfig) -> dict[str, Any]:
    """What the form shows for a config, by name; of several rules, for the first."""
    return {one.name: one.show(config.value(one.setting)) for one in FIELDS}


def fill(strength: str | float, layout: str = SD) -> dict[str, Any]:
    """What a strength, or a preset's name, fills in on this layout, by name: all but what is `beside_strength`."""
    values = values_of(config_of(strength, layout))
    return {one.name: values[one.name] for one in FIELDS if not one.beside_strength}


def change(config: MergeConfig, values: Mapping[str, Any]) -> MergeConfig:
    """The config with values, by the form's names, in the place of its own; None leaves one as it is.

    Raises ValueError or TypeError, in the form's words, with value, range and remedy, for what is not possible.
    """
    unknown = set(values) - set(NAMES)
    if unknown:
        raise ValueError(f"there is no {', '.join(sorted(unknown))} to set; there are: {', '.join(NAMES)}")
    asked = {one.setting: one.read(values[one.name]) for one in FIELDS if values.get(one.name) is not None}
    try:
        return replace(config, **asked)
    except (TypeError, ValueError) as error:
        raise type(error)(_in_the_forms_words(str(error))) from None


def settle(values: Mapping[str, Any]) -> tuple[MergeConfig, list[str]]:
    """The config of those values that are possible; and a sentence for each that was left out, in the form's words.

    Of settings that do not go together the later one is left out, so that choosing another method is no mistake. What
    is missing, or None, or no name of the form's, is passed over.
    """
    config, left_out = MergeConfig(), []
    for name in NAMES:
        try:
            config = change(config, {name: values.get(name)})
        except (TypeError, ValueError) as error:
            said = str(error)  # of two that exclude each other it may begin with the one that stays
            left_out.append(said if said.startswith(f"{name}=") else f"{name}={values[name]!r}, because {said}")
    return config, left_out


def _in_the_forms_words(text: str) -> str:
    """A refusal of the engine's, with the form's names and choices in the place of its own."""
    for one in FIELDS:
        text = re.sub(rf"\b{one.setting}=", f"{one.name}=", text)
        for choice, meaning in zip(one.choices, one.meanings, strict=True):
            text = text.replace(f"{one.name}={meaning!r}", f"{one.name}={choice!r}")
    return text
