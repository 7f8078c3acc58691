"""Compiled models: two operators that a graph runs and no compiler looks into.

One begins a call of the model, one answers an attention, from q, k and v on. A wrap, which a graph names by number,
answers in eager code, so neither settings nor the time are in the graph, and one graph serves all steps of all
samplings.
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
# One namespace for a process, whatever copies of this engine it holds or lets go: torch takes one once. Its number is
# to be raised with any change of what stands behind the operators.
_NAMESPACE = "tome_core_2"
# Compilers of older torches were not tried; 2.9's and 2.13's were.
_TRIED = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 9)
_OTHER = "?"  # in a form: what no graph can be given
# By name, from the first number on; compilers read them here while they trace.
# attend: a site's attention, in its function's form. begun: of the call, or the site itself if the model's own call is
# not compiled.
OPERATORS: dict[str, Any] = {}


def number_of(site: Any) -> torch.Tensor:
    """A number by which a graph names the site, int64 ``[1]`` on the CPU: its input, so that it serves other sites."""
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
    """A wrap that graphs ask while they run. number: by which they name it."""

    def __init__(self, target: Any, name: str = "forward") -> None:
        super().__init__(target, name)
        self.number = number_of(self)

    def _again(self) -> Wrap:
        wrap = super()._again()
        wrap.number = number_of(wrap)
        return wrap


def begin(site: torch.Tensor, form: str, tensors: Sequence[torch.Tensor], numbers: Sequence[int]) -> torch.Tensor:
    """In a graph: a call of a model begins, with arguments as of `pack`. Returns what `attend` is given.

    A function of its own: of a forward that no compiler takes whole, our caller is run as it stands, and the compiler
    would look into the operator.
    """
    return OPERATORS["begin"](site, form, list(tensors), list(numbers))


def why_not_in_graph(state: Any) -> str | None:
    """Why a graph that is being made must not ask, if it must not."""
    if not state.ever_merges:
        return "no rule ever merges here"
    if torch.is_grad_enabled():
        return "a backward pass may follow a compiled call"
    if torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu"):
        return "autocast ends before what a compiled call asks for"
    if not (_TRIED and OPERATORS):
        return "this torch's compiler was not tried with it"
    return "an exported model would need it wherever it runs" if _is_exporting() else None


@when_traced
def _is_exporting() -> bool:
    """Asked while it is traced: torch 2.9's compiler believes so of every graph."""
    return torch.compiler.is_exporting()


def _define(sites: Any) -> torch.library.Library | None:
    """None if torch, which looks through all modules, meets one that raises; the next site tries it again."""

    def run_begin(site: torch.Tensor, form: str, tensors: list[torch.Tensor], numbers: list[int]) -> torch.Tensor:
        sites[int(site)].begins(form, tensors, numbers)
        return site.clone()

    def run_attend(begun: torch.Tensor, site: torch.Tensor, *asked: Any) -> torch.Tensor:
        return sites[int(site)].answers(int(begun) != int(site), *asked).contiguous()

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
    except Exception as error:
        library._destroy()
        _log.debug("compiled models do not merge: %s: %s", type(error).__name__, error)
        return None
    return library


def pack(values: Sequence[Any]) -> tuple[str, list[torch.Tensor], list[int]] | None:
    """Form, tensors and whole numbers of tensors, numbers, None, and lists and tuples of them.

    None if anything else is among them.

    >>> pack([None, 3, [(1, 4)]])
    ('ni[(ii)]', [], [3, 1, 4])
    """
    tensors: list[torch.Tensor] = []
    numbers: list[int] = []
    form = _form(list(values), tensors, numbers)[1:-1]
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
        return _form(torch.scalar_tensor(value, dtype=torch.float64), tensors, numbers)
    if isinstance(value, (list, tuple)):
        inside = "".join([_form(one, tensors, numbers) for one in value])
        return f"[{inside}]" if isinstance(value, list) else f"({inside})"
    return _OTHER


def unpack(form: str, tensors: Sequence[torch.Tensor], numbers: Sequence[int]) -> list[Any]:
    """What was packed.

    >>> unpack("ni[(ii)]", [], [3, 1, 4])
    [None, 3, [(1, 4)]]
    """
    sources = {"t": iter(tensors), "i": iter(numbers), "n": itertools.repeat(None)}
    unfinished: list[list[Any]] = [[]]
    for kind in form:
        if kind in "([":
            unfinished.append([])
        else:
            found = next(sources[kind]) if kind in sources else unfinished.pop()
            unfinished[-1].append(tuple(found) if kind == ")" else found)
    return unfinished[0]
