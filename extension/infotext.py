"""Infotext: how a picture remembers its settings, in one key; and the axes of the X/Y/Z plot.

``0.5`` is a strength; behind it where it merged, if not everywhere, and what an expert set otherwise: ``0.5; hires
pass; sx=2``. No comma and no colon, so that nobody has to quote it, and nothing of the form 2x2, which the webui's
parser would split.
"""

from __future__ import annotations

import logging
import reprlib
from collections.abc import Mapping
from functools import partial
from typing import Any

from ..tome_core.hosting import form
from . import host, options
from .wish import DIAL, EVERYWHERE, FILLED_FOR, OWN, WHERE, Wish, base_of, read, wish_of

logger = logging.getLogger(__name__)
KEY = "ToMe"
KEYS = (KEY, "ToMe strength")  # the second where the webui has a setting that it calls by the first, as SD.Next has
_LONGEST = 2000  # characters of a value that is read
_CHANGES = "_tome_core_xyz"


def text_of(wish: Wish) -> str:
    """The key's value for pictures that this wish made."""
    where = () if wish.where == EVERYWHERE else (wish.where,)
    return "; ".join([f"{wish.strength:.12g}", *where, *(f"{name}={value}" for name, value in wish.changes.items())])


def wish_in(text: str, layout: str) -> Wish:
    """The inverse; parts that make no sense are told in `Wish.left_out`. Raises ValueError if the whole makes none."""
    first, *parts = str(text)[:_LONGEST].split("; ")
    try:
        strength = float(first)
    except ValueError:
        raise ValueError('it has to begin with a strength, as "0.5" does') from None
    where, changes, left_out = EVERYWHERE, {}, []
    for part in parts:
        name, is_setting, value = part.partition("=")
        if part in WHERE:
            where = part
        elif is_setting and name in form.NAMES:
            changes[name] = _value(form.field(name), value)
        else:
            left_out.append(f"{reprlib.repr(part)} is no setting")
    wish = wish_of(strength, where, changes, layout)
    return Wish(True, wish.strength, where, wish.changes, (*left_out, *wish.left_out))


def _value(one: form.Field, text: str) -> Any:
    """In the type of the field, as far as it can be; the form says what it thinks of the rest."""
    if one.choices:
        return text
    if isinstance(one.default, bool):
        return {"True": True, "False": False}.get(text, text)
    try:
        return float(text)
    except ValueError:
        return text


class Paste:
    """What a pasted infotext sets, read once for all controls. on_page: the latest of a page; others are the API's."""

    on_page: Mapping[str, Any] | None = None

    @classmethod
    def note(cls, text: str, parameters: Mapping[str, Any]) -> None:
        """Somebody pastes on a page; its controls are asked next."""
        cls.on_page = parameters

    def __init__(self) -> None:
        self._parameters: Mapping[str, Any] | None = None
        self._values: dict[str, Any] = {}

    def value(self, name: str, parameters: Mapping[str, Any]) -> Any:
        """For one of `wish.ARGUMENTS`, of an infotext that the webui has read; None leaves a control as it is."""
        if parameters is not self._parameters:
            self._parameters, self._values = parameters, _values_in(parameters)
        return self._values.get(name)


def _values_in(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """What the panel shows: off for a picture without us. What cannot be read is told; on a page it sets nothing."""
    key = next((key for key in reversed(KEYS) if key in parameters), None)  # the second first: nobody else uses it
    if key is None:
        return {"enabled": False}
    layout = host.layout()
    try:
        wish = wish_in(parameters[key], layout)
    except (ValueError, TypeError, OverflowError) as error:
        logger.warning("%s: %s in the pasted infotext is ignored: %s", KEY, reprlib.repr(parameters[key]), error)
        return {} if parameters is Paste.on_page else {"enabled": True, "strength": float("nan")}
    for sentence in wish.left_out:
        logger.warning("%s: a part of the pasted infotext is ignored: %s", KEY, sentence)
    dial = {name: getattr(wish, name) for name in DIAL}
    own = {OWN: bool(wish.changes), FILLED_FOR: wish.strength}
    return {**dial, **own, **base_of(wish.strength, layout), **wish.changes}


def changes_of(p: Any) -> dict[str, Any]:
    """What an X/Y/Z plot set for this cell."""
    return getattr(p, _CHANGES, {})


def _apply(name: str, p: Any, value: Any, values: Any) -> None:
    # a new dict, because the plot's copies of p are shallow; an axis of ours means that we are on
    setattr(p, _CHANGES, {**changes_of(p), "enabled": True, name: value})


def _confirm(name: str, p: Any, values: list) -> None:
    """Raises RuntimeError, as the plot's own axes do, for a value that would be drawn unmerged under its label."""
    for value in values:
        try:
            problem = "; ".join(read(({"enabled": True},), options.of_dial, {name: value}, host.layout()).left_out)
        except (TypeError, ValueError) as error:
            problem = str(error)
        if problem:
            raise RuntimeError(f"[ToMe] {problem}")


def add_axes() -> None:
    """Put our axes into the X/Y/Z plot, once: the dial's, and all that an expert sets. When every script is loaded."""
    plot = host.plot_module()
    if plot is None:
        return
    there = {option.label for option in plot.axis_options}
    dial = [("strength", "Strength", float, ()), ("where", "Where", str, WHERE)]
    expert = [(one.name, one.label, type(one.default), one.choices) for one in form.FIELDS]
    for name, label, kind, choices in (*dial, *expert):
        label = f"[ToMe] {label}"
        if label not in there and kind is not bool:
            more = {"choices": lambda choices=choices: list(choices)} if choices else {}
            more["confirm"] = partial(_confirm, name)
            plot.axis_options.append(plot.AxisOption(label, kind, partial(_apply, name), **more))
