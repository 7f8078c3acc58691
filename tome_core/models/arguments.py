"""Arguments of a model's call, by name; and on their way through a compiled graph, which takes flat lists."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import nn

from ..compiling import when_traced

_OTHER = "?"  # in a form: what no graph can be given


def arguments_of(model: nn.Module, args: tuple, kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Of a call of the model, all of them by name. Raises TypeError where the model would."""
    bound = _signature(type(model)).bind(model, *args, **kwargs)
    bound.apply_defaults()
    return bound.arguments


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Those in a tensor, and in lists, tuples and mappings of them."""
    if torch.is_tensor(value):
        yield value
    elif isinstance(value, (list, tuple, Mapping)):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(one)


def named(kwargs: Mapping[str, Any], names: Sequence[str]) -> Any:
    """The first of these keywords that is there; None if there is none."""
    return next((kwargs[name] for name in names if name in kwargs), None)


@cache
def _signature(kind: type[nn.Module]) -> inspect.Signature:
    return inspect.signature(kind.forward)


def pick_arguments(model: nn.Module, names: Sequence[str], args: tuple, kwargs: Mapping[str, Any]) -> list[Any]:
    """Some of them, in a way that a compiler can follow."""
    return [_argument(type(model), name, args, kwargs) for name in names]


def _argument(kind: type[nn.Module], name: str, args: tuple, kwargs: Mapping[str, Any]) -> Any:
    if name in kwargs:
        return kwargs[name]
    place = _place(kind, name)
    return args[place] if place < len(args) else _default(kind, name)


@when_traced
def _place(kind: type[nn.Module], name: str) -> int:
    return list(_signature(kind).parameters).index(name) - 1


@when_traced
def _default(kind: type[nn.Module], name: str) -> Any:
    return _signature(kind).parameters[name].default


def pack(values: Sequence[Any]) -> tuple[str, list[torch.Tensor], list[int]] | None:
    """Form, tensors and whole numbers of tensors, numbers, None, and lists and tuples of them.

    None if anything else is among them.

    >>> pack([None, 3, [(1, 4)]])
    ('ni[(ii)]', [], [3, 1, 4])
    """
    tensors: list[torch.Tensor] = []
    numbers: list[int] = []
    form = "".join([_form(one, tensors, numbers) for one in values])
    return None if _OTHER in form else (form, tensors, numbers)


def _form(value: Any, tensors: list[torch.Tensor], numbers: list[int]) -> str:
    if torch.is_tensor(value):
        tensors.append(value)
        return "t"
    if value is None:
        return "n"
    if isinstance(value, int):
        numbers.append(value)
        return "i"
    if isinstance(value, float):  # as a tensor, so that a graph takes any
        tensors.append(torch.scalar_tensor(value, dtype=torch.float64))
        return "t"
    if isinstance(value, (list, tuple)):
        inside = "".join([_form(one, tensors, numbers) for one in value])
        return f"[{inside}]" if isinstance(value, list) else f"({inside})"
    return _OTHER


def unpack(form: str, tensors: Sequence[torch.Tensor], numbers: Sequence[int]) -> list[Any]:
    """What was packed.

    >>> unpack("ni[(ii)]", [], [3, 1, 4])
    [None, 3, [(1, 4)]]
    """
    return _unpack(iter(form), iter(tensors), iter(numbers))


def _unpack(form: Iterator[str], tensors: Iterator[torch.Tensor], numbers: Iterator[int]) -> list[Any]:
    """Up to the end of a list."""
    found: list[Any] = []
    for kind in form:
        if kind in ")]":
            break
        if kind in "([":
            inside = _unpack(form, tensors, numbers)
            found.append(tuple(inside) if kind == "(" else inside)
        else:
            found.append({"t": tensors, "i": numbers}[kind].__next__() if kind != "n" else None)
    return found
