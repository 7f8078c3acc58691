"""Which attentions are known, by the name of the function that computes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from .known import KnownAttention, LeftAlone

Description = KnownAttention | LeftAlone | None
Entry = KnownAttention | LeftAlone | Callable[[nn.Module], Description]

_ENTRIES: dict[str, Entry] = {}
_FOUND: dict[Any, Entry | None] = {}  # by function: looked up by name once
_MOST = 256  # functions; a host that makes new ones all the time must not fill the memory


def register(forward: str, entry: Entry) -> None:
    """Make an attention known.

    forward: module and qualified name of the function that is ``type(module).forward`` while the attention is in force.
    entry: its description, or a function that is asked at every call which description fits the module, if any.
    A second entry for a name replaces the first.
    """
    _ENTRIES[forward] = entry
    _FOUND.clear()


def known_of(module: nn.Module) -> Description:
    """What is known of the attention that the module computes at this moment; None where nothing is."""
    forward = type(module).forward
    try:
        entry = _FOUND[forward]
    except KeyError:
        if len(_FOUND) >= _MOST:
            _FOUND.clear()
        entry = _FOUND[forward] = _ENTRIES.get(function_name(forward))
    if entry is None or isinstance(entry, (KnownAttention, LeftAlone)):
        return entry
    return entry(module)


def name_of(module: nn.Module) -> str:
    """What a report calls the attention: the class of its processor, where it has one, else its own."""
    return type(getattr(module, "processor", module)).__name__


def function_name(function: Any) -> str:
    """Module and qualified name."""
    return f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', '')}"
