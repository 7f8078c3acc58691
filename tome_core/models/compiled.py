"""The two operators in graphs of compiled models: ``begin`` begins a call of the model, ``attend`` answers attentions.

No compiler looks into them. Both let a wrap, which they look up by its number, answer in eager code. So neither the
settings nor the time are part of the graph, and one graph serves all steps of all samplings.
"""

from __future__ import annotations

import itertools
import logging
import sys
import weakref
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch

from ..compiling import when_traced
from .wrap import Wrap

_log = logging.getLogger(__name__)
# One namespace for each process, because torch registers a namespace once, however many copies of this engine the
# process loads or unloads. Raise the number whenever the operators or what they call change.
_NAMESPACE = "tome_core_3"
# The compilers of torch 2.9 and 2.13 were tried, older ones were not.
TRIED = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 9)
_OTHER = "?"  # in a form: a value that cannot be passed to an operator
# The operators by name, "begin" and "attend", filled by the first call of `number_of`; empty if that fails. Compilers
# read them while they trace. The first argument of "attend" is the result of "begin", or the number of the attention's
# own wrap if the model call itself is not compiled.
OPERATORS: dict[str, Any] = {}


def number_of(site: Any) -> torch.Tensor:
    """Register a site, an object with ``begin_in_graph`` or ``attend_in_graph``, and return its new number for graphs.

    The number is an int64 tensor ``(1,)`` on the CPU: an input of the graph, not a constant, so that one graph serves
    several sites. The site is held weakly. The first call defines the operators; if that fails, the next tries again.
    """
    place = f"_{_NAMESPACE}_operators"
    shared = sys.modules.setdefault(place, ModuleType(place))
    if not hasattr(shared, "sites"):
        shared.sites, shared.numbers, shared.library = weakref.WeakValueDictionary(), itertools.count(), None
    if shared.library is None:
        shared.library = _define(shared.sites)
    if shared.library is not None and not OPERATORS:
        known = getattr(torch.ops, _NAMESPACE)
        OPERATORS.update(begin=known.begin.default, attend=known.attend.default)
    number = next(shared.numbers)
    shared.sites[number] = site
    with torch.inference_mode(False):
        return torch.tensor([number], device="cpu")


class NumberedSite(Wrap):
    """A wrap with a `number` of its own, by which graphs call its ``begin_in_graph`` or ``attend_in_graph``."""

    def __init__(self, target: Any, name: str = "forward") -> None:
        super().__init__(target, name)
        self.number = number_of(self)

    def _new_wrap(self) -> Wrap:
        """Return a copy of this wrap, with a number of its own."""
        wrap = super()._new_wrap()
        wrap.number = number_of(wrap)
        return wrap


def begin(site: torch.Tensor, form: str, tensors: Sequence[torch.Tensor], numbers: Sequence[int]) -> torch.Tensor:
    """Put the operator ``begin`` into the graph that is traced. Its result, a copy of `site`, is for ``attend``.

    `site` is the number of the model's wrap; the rest is what `pack` made of the call's arguments.
    """
    # a separate function, because a compiler that fails on the whole forward runs the caller as plain Python, and would
    # trace into the operator there
    return OPERATORS["begin"](site, form, list(tensors), list(numbers))


def why_not_in_graph(state: Any) -> str | None:
    """Return why a traced graph must not use the operators while the patch `state` is in force; None if it may."""
    if not state.ever_merges:
        return "no rule ever merges here"
    if torch.is_grad_enabled():
        return "a backward pass may follow a compiled call"
    if torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu"):
        return "autocast is not supported in compiled models"
    if not (TRIED and OPERATORS):
        return "merging was not tested with this torch's compiler"
    return "exported models cannot depend on this package" if _is_exporting() else None


@when_traced
def _is_exporting() -> bool:  # a constant, because traced code in torch 2.9 always gets True
    """Return whether the graph that is being traced is exported (``torch.export``)."""
    return torch.compiler.is_exporting()


def _define(sites: Any) -> torch.library.Library | None:
    """Define the operators, which look up a site by its number in `sites`; return their library, None on an error."""

    def run_begin(site: torch.Tensor, form: str, tensors: list[torch.Tensor], numbers: list[int]) -> torch.Tensor:
        sites[int(site)].begin_in_graph(form, tensors, numbers)
        return site.clone()

    def run_attend(begun: torch.Tensor, site: torch.Tensor, *call: Any) -> torch.Tensor:
        return sites[int(site)].attend_in_graph(int(begun) != int(site), *call).contiguous()

    def shape_of_attend(begun: Any, site: Any, q: torch.Tensor, k: Any, v: torch.Tensor, *_: Any) -> torch.Tensor:
        return q.new_empty(*q.shape[:3], v.shape[-1])

    library = torch.library.Library(_NAMESPACE, "DEF")
    tags = [getattr(torch.Tag, tag) for tag in ("pt2_compliant_tag", "cudagraph_unsafe") if hasattr(torch.Tag, tag)]
    try:
        for name, schema, run, shape in (
            ("begin", "(Tensor site, str form, Tensor[] tensors, SymInt[] numbers) -> Tensor", run_begin,
             lambda site, *_: torch.empty_like(site)),
            ("attend", "(Tensor begun, Tensor site, Tensor q, Tensor k, Tensor v, Tensor? mask, bool by_head, "
             "float? scale, bool gqa, str backend) -> Tensor", run_attend, shape_of_attend),
        ):  # fmt: skip
            library.define(name + schema, tags=tags)
            library.impl(name, run, "CompositeExplicitAutograd")
            torch.library.register_fake(f"{_NAMESPACE}::{name}", shape, lib=library)
    except Exception as error:  # torch inspects all loaded modules, and some raise errors
        library._destroy()
        _log.debug("compiled models do not merge: %s: %s", type(error).__name__, error)
        return None
    return library


def pack(values: Sequence[Any]) -> tuple[str, list[torch.Tensor], list[int]] | None:
    """Flatten values (tensors, numbers, None, lists, tuples) into a form, a list of tensors and one of whole numbers.

    The form has "t" for a tensor, "i" for a whole number or bool, "n" for None, "[]" for a list, "()" for a tuple; but
    no brackets for `values` itself. A float becomes a float64 tensor ``[]``. None if any value is of another type.

    >>> pack([None, 3, [(1, 4)]])
    ('ni[(ii)]', [], [3, 1, 4])
    """
    tensors: list[torch.Tensor] = []
    numbers: list[int] = []
    form = _form(list(values), tensors, numbers)[1:-1]
    return None if _OTHER in form else (form, tensors, numbers)


def _form(value: Any, tensors: list[torch.Tensor], numbers: list[int]) -> str:
    """Return the form of a value as in `pack`, "?" for an unsupported type, as a dict; append tensors and ints."""
    if torch.is_tensor(value):
        tensors.append(value)
        return "t"
    if value is None:
        return "n"
    if isinstance(value, int):
        numbers.append(value)
        return "i"
    if isinstance(value, float):  # as a tensor, so that the graph accepts any float
        return _form(torch.scalar_tensor(value, dtype=torch.float64), tensors, numbers)
    if isinstance(value, (list, tuple)):
        inside = "".join([_form(item, tensors, numbers) for item in value])
        return f"[{inside}]" if isinstance(value, list) else f"({inside})"
    return _OTHER


def unpack(form: str, tensors: Sequence[torch.Tensor], numbers: Sequence[int]) -> list[Any]:
    """Return the list of values that `pack` flattened into these, nested as in `form`; a float comes back as a tensor.

    >>> unpack("ni[(ii)]", [], [3, 1, 4])
    [None, 3, [(1, 4)]]
    """
    sources = {"t": iter(tensors), "i": iter(numbers), "n": itertools.repeat(None)}
    unfinished: list[list[Any]] = [[]]
    for kind in form:
        if kind in "([":
            unfinished.append([])
        else:
            value = next(sources[kind]) if kind in sources else unfinished.pop()
            unfinished[-1].append(tuple(value) if kind == ")" else value)
    return unfinished[0]
