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
_IDLE: dict[str, Callable[[nn.Module, Any], bool]] = {}
_MOST = 256  # functions; a host that makes new ones all the time must not fill the memory


def register(forward: str, entry: Entry) -> None:
    """Make an attention known.

    forward: module and qualified name of the function that is ``type(module).forward`` while the attention is in force.
    entry: its description, or a function that is asked at every call which description fits the module, if any.
    A second entry for a name replaces the first.
    """
    _ENTRIES[forward] = entry
    _FOUND.clear()


def register_wrapper(name: str, is_idle: Callable[[nn.Module, Any], bool]) -> None:
    """Make somebody's wrappers known, who leaves them on modules when they are switched off.

    is_idle: of a module and what stands in place of its ``forward``: is that such a wrapper, and does it do at this
    moment just what ``type(module).forward`` does? A second one of a name replaces the first.
    """
    _IDLE[name] = is_idle


def known_of(module: nn.Module, instead: Any = None) -> Description:
    """What is known of the attention that the module computes at this moment; None where nothing is.

    instead: what stands in place of its ``forward``, if anything.
    """
    if instead is not None and not any(is_idle(module, instead) for is_idle in _IDLE.values()):
        return None
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
