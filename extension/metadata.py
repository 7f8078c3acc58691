"""Infotext: how a picture remembers its settings; and the axes of the X/Y/Z plot.

Keys hold letters, spaces and - only, and no value has the form 2x2: the webui's parser would split it.
"""

from __future__ import annotations

import logging
import reprlib
from collections.abc import Callable, Mapping
from typing import Any

from .settings import CUSTOM, FIELDS, MOST, OWN, Field, Wish, field

logger = logging.getLogger(__name__)
# "Token merging ratio" belongs to the webui's own merging
KEYS = {
    "ratio": "ToMe ratio",
    "preset": "ToMe preset",
    "hires": "ToMe hires",
    "hires_ratio": "ToMe hires ratio",
    "level": "ToMe level",
    "start_percent": "ToMe start",
    "end_percent": "ToMe end",
    "min_pixels": "ToMe min pixels",
    "method": "ToMe method",
    "merge_what": "ToMe merge what",
    "merge_crossattn": "ToMe cross-attention",
    "merge_mlp": "ToMe MLP",
    "sx": "ToMe stride x",
    "sy": "ToMe stride y",
    "use_rand": "ToMe random",
    "seed": "ToMe seed",
    "early_ratio": "ToMe early ratio",
    "early_until": "ToMe early until",
    "proportional": "ToMe size-aware keys",
    "metric": "ToMe compare",
    "refine": "ToMe refinement",
    "query_ratio": "ToMe query ratio",
    "keep": "ToMe keep",
    "only_if_it_pays": "ToMe only where it pays",
    "deep_mlp": "ToMe deep MLP",
}
_ALWAYS = ("ratio", "method")
_HIRES = ("hires", "hires_ratio")
_OTHERS = ("preset", *_HIRES)
_CHANGES = "_tome_core_xyz"
AXES = ("preset", "ratio", "hires_ratio", "early_ratio", "method", "level", "start_percent", "end_percent")


def written(wish: Wish, has_hires: bool) -> dict[str, Any]:
    """The infotext of a job that is on: ratio and method always, else what differs from the defaults.

    The preset is named beside the values that it stood for, as a note to the reader: they are what is pasted.
    """
    values = wish.values
    found = {KEYS[one.name]: values[one.name] for one in FIELDS if one.name in KEYS and one.name not in _OTHERS
             and (one.name in _ALWAYS or values[one.name] != one.default)}  # fmt: skip
    if values["preset"] != CUSTOM:
        found[KEYS["preset"]] = values["preset"]
    if has_hires:
        found[KEYS["hires"]] = values["hires"]
        if values["hires"] == OWN:
            found[KEYS["hires_ratio"]] = values["hires_ratio"]
    return found


def without_ours(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """A copy without our keys: the cells of an X/Y/Z plot share one dict, and write into it one after another."""
    ours = set(KEYS.values())
    return {key: value for key, value in parameters.items() if key not in ours}


def read_back(one: Field, parameters: Mapping[str, str]) -> Any:
    """A control's value from a pasted infotext; None leaves the control as it is.

    A picture made without us turns us off and leaves the rest alone; what one made with us does not mention is at
    its default, but for the hires settings, which a picture without a hires pass says nothing about. What makes no
    sense is ignored, and the log says so: the webui would paste nothing of a picture for which this raises.
    """
    if one.name == "enabled":
        return KEYS["ratio"] in parameters
    if KEYS["ratio"] not in parameters:
        return None
    if one.name == "preset":
        return CUSTOM
    text = parameters.get(KEYS[one.name])
    if text is None:
        return None if one.name in _HIRES else one.default
    try:
        return _parsed(one, text)
    except (ValueError, TypeError, OverflowError):
        logger.warning("%s: %s in the pasted infotext makes no sense and is ignored; %s", KEYS[one.name],
                       reprlib.repr(text), _possible(one))  # fmt: skip
        return None


def _parsed(one: Field, text: Any) -> Any:
    """The value of the text. Raises ValueError, TypeError or OverflowError where it makes no sense."""
    if isinstance(one.default, bool) or one.choices:
        if str(text) not in _words(one):
            raise ValueError(text)
        return str(text) if one.choices else str(text) == "True"
    value = float(text)
    # compared before it is converted: neither infinity nor NaN is a whole number
    if not one.minimum <= value <= one.limit or (isinstance(one.default, int) and not value.is_integer()):
        raise ValueError(text)
    return value if isinstance(one.default, float) else int(value)


def _words(one: Field) -> tuple[str, ...]:
    return one.choices or ("True", "False")


def _possible(one: Field) -> str:
    if isinstance(one.default, bool) or one.choices:
        return f"use one of {', '.join(_words(one))}"
    kind = "a number" if isinstance(one.default, float) else "a whole number"
    return f"use {kind} from {one.minimum:g} {'up' if one.limit == MOST else f'to {one.limit:.10g}'}"


def paste_functions() -> dict[str, Callable[[Mapping[str, str]], Any]]:
    """Field name -> what the webui calls with a pasted infotext."""
    return {one.name: lambda parameters, one=one: read_back(one, parameters) for one in FIELDS}


def changes_of(p: Any) -> dict[str, Any]:
    """What an X/Y/Z plot set for this cell."""
    return getattr(p, _CHANGES, {})


def _apply(name: str) -> Callable[[Any, Any, Any], None]:
    def apply(p: Any, value: Any, values: Any) -> None:
        # a new dict, because the plot's copies of p are shallow; an axis of ours means that we are on
        setattr(p, _CHANGES, {**changes_of(p), "enabled": True, name: value})

    return apply


def add_axes(plot: Any) -> None:
    """Put our axes into the X/Y/Z plot's module, once."""
    there = {option.label for option in plot.axis_options}
    for name in AXES:
        one = field(name)
        label = f"[ToMe] {one.label}"
        if label not in there:
            choices = {"choices": lambda one=one: list(one.choices)} if one.choices else {}
            plot.axis_options.append(plot.AxisOption(label, type(one.default), _apply(name), **choices))
