"""Taking apart what holds tensors, and putting it together over other ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from ..merging.plan import MergePlan

Form = Any  # anything without the values of its tensors: hashable, and equal where one set of buffers fits both
_CONSTANTS = (type(None), bool, int, float, str, torch.dtype, torch.device)


class Unrecordable(Exception):
    """Why a call cannot be recorded, in a sentence's words."""


class _Tensor(NamedTuple):
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


class _Constant(NamedTuple):  # with its type, because 1, 1.0 and True are equal
    kind: type
    value: Any


class _Items(NamedTuple):  # names: of a dict's
    kind: type
    names: tuple | None
    values: tuple


def take_apart(value: Any) -> tuple[Form, list[torch.Tensor]]:
    """Its form and its tensors, a plan's derived ones too. Raises Unrecordable for what might change unseen."""
    tensors: list[torch.Tensor] = []
    return _form(value, tensors), tensors


def put_together(form: Form, tensors: Sequence[torch.Tensor]) -> Any:
    """Something of this form over these tensors: `take_apart` undone."""
    return _build(form, iter(tensors))


def empty_tensors(form: Form) -> list[torch.Tensor]:
    """Tensors that something of this form can be copied into."""
    with torch.inference_mode(False):  # whoever calls later may write into them
        return [torch.empty(one.shape, dtype=one.dtype, device=one.device) for one in _tensors_in(form)]


def copy_all(to: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    """Copy tensors into others of their shapes and types, in as few kernels as there are types."""
    for dtype in {one.dtype for one in to}:
        pairs = [pair for pair in zip(to, values, strict=True) if pair[0].dtype == dtype]
        torch._foreach_copy_([one for one, _ in pairs], [one for _, one in pairs])


def _form(value: Any, tensors: list[torch.Tensor]) -> Form:
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return _Tensor(value.shape, value.dtype, value.device)
    if isinstance(value, MergePlan):
        return _Items(MergePlan, None, (_form(vars(value), tensors),))
    if isinstance(value, dict):
        return _Items(type(value), tuple(value), tuple(_form(one, tensors) for one in value.values()))
    if isinstance(value, (tuple, list)):
        return _Items(type(value), None, tuple(_form(one, tensors) for one in value))
    if isinstance(value, _CONSTANTS):
        return _Constant(type(value), value)
    raise Unrecordable(f"an argument or a result is of class {type(value).__name__}, which may change unseen")


def _build(form: Form, tensors: Iterator[torch.Tensor]) -> Any:
    if isinstance(form, _Tensor):
        return next(tensors)
    if isinstance(form, _Constant):
        return form.value
    values = [_build(one, tensors) for one in form.values]
    if form.kind is MergePlan:
        plan = MergePlan.__new__(MergePlan)
        vars(plan).update(*values)
        return plan
    if form.names is None:
        return form.kind(*values) if hasattr(form.kind, "_fields") else form.kind(values)
    entries = dict(zip(form.names, values, strict=True))
    return entries if form.kind is dict else form.kind(**entries)


def _tensors_in(form: Form) -> Iterator[_Tensor]:
    if isinstance(form, _Tensor):
        yield form
    elif isinstance(form, _Items):
        for one in form.values:
            yield from _tensors_in(one)
