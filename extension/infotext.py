"""Infotext: how a picture remembers its settings, in one key; and the axes of the X/Y/Z plot.

``0.5 v1`` is a strength and the version of the table that says what it stands for; behind it where it merged, if not
everywhere, and what an expert set otherwise: ``0.5 v1; hires pass; sx=2``. No comma and no colon, so that nobody has to
quote it, and nothing of the form 2x2, which the webui's parser would split.
"""

from __future__ import annotations

import functools
import logging
import math
import re
import reprlib
from collections.abc import Callable, Mapping
from typing import Any

from ..tome_core import form
from . import host
from .wish import DIAL, EVERYWHERE, FILLED_FOR, OWN, VERSION, WHERE, Wish, base_of, wish_of

logger = logging.getLogger(__name__)
KEY = "ToMe"
KEYS = (KEY, "ToMe strength")  # the second where the webui has a setting that it calls by the first, as SD.Next has
_BEGINNING = re.compile(r"(\S+) v(\d{1,6})")
_LONGEST = 2000  # characters of a value that is read
_CHANGES = "_tome_core_xyz"


def text_of(wish: Wish) -> str:
    """The key's value for pictures that this wish made."""
    parts = [f"{wish.strength:.12g} v{VERSION}"]
    if wish.where != EVERYWHERE:
        parts.append(wish.where)
    return "; ".join([*parts, *(f"{name}={value}" for name, value in wish.changes.items())])


@functools.lru_cache(maxsize=8)
def wish_in(text: str, layout: str) -> Wish:
    """The inverse, also for a picture by an earlier table. Raises ValueError for what makes no sense as a whole.

    layout: of the model, see `strength`. A part that makes no sense is left out, and told in `Wish.left_out`.
    """
    first, *parts = str(text)[:_LONGEST].split("; ")
    found = _BEGINNING.fullmatch(first)
    if found is None:
        raise ValueError('it has to begin with a strength and a version, as "0.5 v1" does')
    where, changes, left_out = EVERYWHERE, {}, []
    for part in parts:
        name, is_setting, value = part.partition("=")
        if part in WHERE:
            where = part
        elif is_setting and name in form.NAMES:
            changes[name] = _value(form.field(name), value)
        else:
            left_out.append(f"{reprlib.repr(part)} is no setting")
    wish = wish_of(float(found[1]), where, changes, int(found[2]), layout)
    return Wish(True, wish.strength, where, wish.changes, (*left_out, *wish.left_out))


def _value(one: form.Field, text: str) -> Any:
    """In the type of the field, as far as it can be; the form says what it thinks of the rest."""
    if one.choices:
        return text
    if isinstance(one.default, bool):
        return {"True": True, "False": False}.get(text, text)
    try:
        value = float(text)
    except ValueError:
        return text
    return int(value) if math.isfinite(value) and value.is_integer() and isinstance(one.default, int) else value


def _key_in(parameters: Mapping[str, Any]) -> str | None:
    """Ours, by whichever name; the second one first, which nobody else uses."""
    return next((key for key in reversed(KEYS) if key in parameters), None)


def _pasted(parameters: Mapping[str, Any]) -> Wish | None:
    """The wish of a pasted infotext; None where there is none that can be read."""
    key = _key_in(parameters)
    try:
        return wish_in(parameters[key], host.layout()) if key is not None else None
    except (ValueError, TypeError, OverflowError):
        return None


def _switch(parameters: Mapping[str, Any]) -> bool | None:
    """Whether we are on: off for a picture without us. What cannot be read is told and leaves the panel alone."""
    key = _key_in(parameters)
    if key is None:
        return False
    try:
        wish = wish_in(parameters[key], host.layout())
    except (ValueError, TypeError, OverflowError) as error:
        logger.warning("%s: %s in the pasted infotext is ignored: %s", KEY, reprlib.repr(parameters[key]), error)
        return None
    for sentence in wish.left_out:
        logger.warning("%s: a part of the pasted infotext is ignored: %s", KEY, sentence)
    return True


def _shown(name: str, wish: Wish) -> Any:
    """What the panel shows for a wish."""
    if name in DIAL:
        return getattr(wish, name)
    if name in (OWN, FILLED_FOR):
        return bool(wish.changes) if name == OWN else wish.strength
    return wish.changes.get(name, base_of(wish.strength, host.layout())[name])


def paste_function(name: str) -> Callable[[Mapping[str, Any]], Any]:
    """What the webui calls with a pasted infotext, for one of `wish.ARGUMENTS`; None leaves a control as it is."""
    if name == "enabled":
        return _switch

    def read(parameters: Mapping[str, Any]) -> Any:
        wish = _pasted(parameters)
        return None if wish is None else _shown(name, wish)

    return read


def changes_of(p: Any) -> dict[str, Any]:
    """What an X/Y/Z plot set for this cell."""
    return getattr(p, _CHANGES, {})


def _apply(name: str) -> Callable[[Any, Any, Any], None]:
    def apply(p: Any, value: Any, values: Any) -> None:
        # a new dict, because the plot's copies of p are shallow; an axis of ours means that we are on
        setattr(p, _CHANGES, {**changes_of(p), "enabled": True, name: value})

    return apply


def add_axes(plot: Any) -> None:
    """Put our axes into the X/Y/Z plot's module, once: the dial's, and all that an expert sets."""
    there = {option.label for option in plot.axis_options}
    dial = [("strength", "Strength", float, ()), ("where", "Where", str, WHERE)]
    expert = [(one.name, one.label, str if isinstance(one.default, bool) else type(one.default), one.choices)
              for one in form.FIELDS if not isinstance(one.default, bool)]  # fmt: skip
    for name, label, kind, choices in (*dial, *expert):
        label = f"[ToMe] {label}"
        if label not in there:
            more = {"choices": lambda choices=choices: list(choices)} if choices else {}
            plot.axis_options.append(plot.AxisOption(label, kind, _apply(name), **more))
