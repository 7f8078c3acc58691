"""The settings of a picture as one key of the webui's infotext, and the axes of the X/Y/Z plot."""

import logging
import reprlib
from collections.abc import Mapping
from functools import partial
from typing import Any

from ..tome_core.hosting import form
from . import host, job_settings, settings_tab
from .job_settings import DIAL, EVERYWHERE, EXPERT_SWITCH, FILLED_FOR, WHERE, JobSettings, base_of, read, settings_of

logger = logging.getLogger(__name__)
# a value has no comma or colon, which would need quotes, and no text such as 2x2, which the webui's parser splits
KEY = "ToMe"
KEYS = (KEY, "ToMe strength")  # the second for SD.Next, which has a setting of the first name
_LONGEST = 2000  # characters of a value that are read
_CHANGES = "_tome_core_xyz"


def text_of(settings: JobSettings) -> str:
    """Return the infotext key's value: strength, the pass if only one merges, changes; as ``0.5; hires pass; sx=2``."""
    where = () if settings.where == EVERYWHERE else (settings.where,)
    changes = (f"{name}={value}" for name, value in settings.changes.items())
    return "; ".join([f"{settings.strength:.12g}", *where, *changes])


def settings_in(text: str, curve: str) -> JobSettings:
    """Return the settings in a key's value, as ``0.5; hires pass; sx=2``, with merging on; the inverse of `text_of`.

    The result's `changes` differ from the strength's settings for a model of this `curve`. Parts that are no setting,
    or not possible, are listed in its `left_out`. ValueError: the strength at the beginning is missing or not possible.
    """
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
    settings = settings_of(strength, where, changes, curve)
    return JobSettings(True, settings.strength, where, settings.changes, (*left_out, *settings.left_out))


def _value(field: form.Field, text: str) -> Any:
    """Convert a text to a bool or float if the field is a switch or number. Choices and texts that do not fit stay."""
    if field.choices:
        return text
    if isinstance(field.default, bool):
        return {"True": True, "False": False}.get(text, text)
    try:
        return float(text)
    except ValueError:
        return text


class Paste:
    """The panel's values in a pasted infotext, read once for all controls."""

    on_page: Mapping[str, Any] | None = None  # the one last pasted on a page; any other came from the API

    @classmethod
    def note(cls, text: str, parameters: Mapping[str, Any]) -> None:
        """Keep a parsed infotext in `on_page`. The webui calls this at a paste, before `value`. `text` is not used."""
        cls.on_page = parameters

    def __init__(self) -> None:
        self._parameters: Mapping[str, Any] | None = None
        self._values: dict[str, Any] = {}

    def value(self, name: str, parameters: Mapping[str, Any]) -> Any:
        """Return a control's value in a parsed infotext, by its name in `ARGUMENTS`; None lets the control stay."""
        if parameters is not self._parameters:  # one object for all controls of a paste
            self._parameters, self._values = parameters, _values_in(parameters)
        return self._values.get(name)


def _values_in(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of all `ARGUMENTS` in a parsed infotext, by name; ``{"enabled": False}`` without our key."""
    key = next((key for key in reversed(KEYS) if key in parameters), None)  # the second first, because only we use it
    if key is None:
        return {"enabled": False}
    curve = host.curve()
    try:
        settings = settings_in(parameters[key], curve)
    except (ValueError, TypeError, OverflowError) as error:
        problem = f"{reprlib.repr(parameters[key])} in the infotext is not used: {error}"
        if parameters is not Paste.on_page:  # of the API, `read` refuses it later
            strength = job_settings.Unreadable("nan")
            strength.reason = problem
            return {"enabled": True, "strength": strength}
        logger.warning("%s", problem)  # no control changes
        return {}
    for sentence in settings.left_out:
        logger.warning("a part of the infotext is not used: %s", sentence)
    dial = {name: getattr(settings, name) for name in DIAL}
    own = {EXPERT_SWITCH: bool(settings.changes), FILLED_FOR: settings.strength}
    return {**dial, **own, **base_of(settings.strength, curve), **settings.changes}


def changes_of(p: Any) -> dict[str, Any]:
    """Return the values that our axes of an X/Y/Z plot have set for a cell's job object, by name; {} if none has."""
    return getattr(p, _CHANGES, {})


def _apply(name: str, p: Any, value: Any, values: Any) -> None:
    """Set a named value for a cell's job object `p`, and turn merging on. A plot calls this; `values` is not used."""
    # a new dict, because the plot's copies of p are shallow; our axes switch merging on
    setattr(p, _CHANGES, {**changes_of(p), "enabled": True, name: value})


def _confirm(name: str, p: Any, values: list) -> None:
    """Check the axis's values before a plot. RuntimeError, as plots expect: a value is wrong or would be left out."""
    for value in values:
        try:
            settings = read(({"enabled": True},), settings_tab.default_of, {name: value}, host.curve())
            problem = "; ".join(settings.left_out)
        except (TypeError, ValueError) as error:
            problem = str(error)
        if problem:
            raise RuntimeError(f"[ToMe] {problem}")


def add_axes() -> None:
    """Add to the webui's X/Y/Z plot, if there, its missing axes: strength, where, expert settings except switches."""
    plot = host.plot_module()
    if plot is None:
        return
    there = {option.label for option in plot.axis_options}
    dial = [("strength", "Strength", float, ()), ("where", "Where", str, WHERE)]
    expert = [(field.name, field.label, type(field.default), field.choices) for field in form.FIELDS]
    for name, label, kind, choices in (*dial, *expert):
        label = f"[ToMe] {label}"
        if label not in there and kind is not bool:
            more = {"choices": lambda choices=choices: list(choices)} if choices else {}
            more["confirm"] = partial(_confirm, name)
            plot.axis_options.append(plot.AxisOption(label, kind, partial(_apply, name), **more))
