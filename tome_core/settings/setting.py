"""What a setting says of itself, and the check of its values."""

from __future__ import annotations

from dataclasses import field
from typing import Any

_ENDLESS = 2**53 - 1  # what has no upper limit of its own ends here, before floats stop counting


def setting(default: Any, label: str, help: str, **facts: Any) -> Any:
    """A dataclass's field with what a person needs to know of it.

    facts: minimum, maximum, step, choices, advanced; unset: what None means, where it is not "automatic"; limit,
    open_ended: see `config.describe_settings`; place, known_as, shown, beside_strength: see `form`.
    """
    return field(default=default, metadata={"label": label, "help": help, **facts})


def check(item: Any, value: Any) -> Any:
    """The value in the type of its field, or an error that names the value, the range and the remedy."""
    facts, name = item.metadata, item.name
    if value is None and item.default is None:
        return None
    if "choices" in facts:
        # `1 == True` in Python, so types are compared as well
        if not any(value == choice and type(value) is type(choice) for choice in facts["choices"]):
            raise ValueError(f"{name}={value!r} is not possible; use {one_of(facts['choices'])}")
        return value
    if isinstance(item.default, bool):
        if not isinstance(value, bool):
            raise TypeError(f"{name}={value!r} is {type(value).__name__}; use True or False")
        return value
    return _check_number(name, facts, value)


def _check_number(name: str, facts: Any, value: Any) -> int | float:
    whole = isinstance(facts["step"], int)
    kind = "a whole number" if whole else "a number"
    most = _ENDLESS if facts.get("open_ended") else facts.get("limit", facts["maximum"])
    range_text = f"use {kind} from {facts['minimum']} {'up' if most == _ENDLESS else f'to {most}'}"
    if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
        raise TypeError(f"{name}={value!r} is {type(value).__name__}; {range_text}")
    # compared and not converted: a whole number may be past the largest float; and so that NaN is out of range
    if not facts["minimum"] <= value <= most:
        raise ValueError(f"{name}={value!r} is out of range; {range_text}")
    return value if whole else float(value)


def one_of(choices: tuple[Any, ...]) -> str:
    """The choices as a refusal names them."""
    return "one of " + ", ".join(repr(choice) for choice in choices)
