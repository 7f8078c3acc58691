"""Operators that a compiled graph runs and no compiler looks into; a site, which a graph names by number, answers.

A site is any object that lives beside the graph. Its answer is eager code, at any time of any sampling, so one graph
serves all of that and a compiler has nothing to make anew.
"""

from __future__ import annotations

import itertools
import logging
import sys
import weakref
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, NamedTuple

import torch

from ..model.wrap import Wrap

_log = logging.getLogger(__name__)
Sites = Mapping[int, Any]


class Operator(NamedTuple):
    """An operator is a question of a graph's to a site.

    schema: as torch wants it. run: the answer, of `Sites` and the arguments. shape: an empty one, of them alone.
    """

    schema: str
    run: Callable[..., Any]
    shape: Callable[..., Any]


def empty_like_site(site: torch.Tensor, *_: Any) -> torch.Tensor:
    """The shape of an answer that is the number again."""
    return torch.empty_like(site)


class Operators:
    """Operators under one namespace, by name.

    One of them for a process, whatever copies of this engine it holds or lets go: torch takes a namespace once. Its
    number is to be raised with any change of what stands behind the operators.
    made: torch's own, from the first site on; empty where torch could not be told. Compilers read it while they trace.
    """

    def __init__(self, namespace: str, without: str, **operators: Operator) -> None:
        """without: what happens where torch cannot be told of them, for the log."""
        self.namespace, self._without, self._operators = namespace, without, operators
        self._place = f"_{namespace}_operators"
        self.made: dict[str, Any] = {}

    def number_of(self, site: Any) -> torch.Tensor:
        """A number by which a graph names the site, int64 ``[1]`` on the CPU: its input, so that it serves others."""
        shared = sys.modules.get(self._place) or sys.modules.setdefault(self._place, self._nothing_yet())
        if shared.library is None:
            shared.library = self._define_all(shared.sites)
        if shared.library is not None and not self.made:
            known = getattr(torch.ops, self.namespace)
            self.made.update({name: getattr(known, name).default for name in self._operators})
        number = next(shared.numbers)
        shared.sites[number] = site
        with torch.inference_mode(False):
            return torch.tensor([number], device="cpu")

    def _nothing_yet(self) -> ModuleType:
        made = ModuleType(self._place)
        made.sites, made.numbers, made.library = weakref.WeakValueDictionary(), itertools.count(), None
        return made

    def _define_all(self, sites: Sites) -> torch.library.Library | None:
        """None where torch, which looks through all modules, meets one that raises; the next site tries it again."""
        library = torch.library.Library(self.namespace, "DEF")
        try:
            for name, operator in self._operators.items():
                self._define(library, sites, name, operator)
        except Exception as error:
            library._destroy()
            _log.debug("%s: %s: %s", self._without, type(error).__name__, error)
            return None
        return library

    def _define(self, library: torch.library.Library, sites: Sites, name: str, operator: Operator) -> None:
        def run(*args: Any) -> Any:
            return operator.run(sites, *args)

        tags = [getattr(torch.Tag, tag) for tag in ("pt2_compliant_tag", "cudagraph_unsafe") if hasattr(torch.Tag, tag)]
        library.define(name + operator.schema, tags=tags)
        library.impl(name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{self.namespace}::{name}", operator.shape, lib=library)


class NumberedSite(Wrap):
    """A wrap that graphs ask while they run. number: by which they name it; a copy has its own."""

    operators: Operators

    def __init__(self, target: Any, name: str = "forward") -> None:
        super().__init__(target, name)
        self.number = self.operators.number_of(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.number = self.operators.number_of(self)
