"""What a compiled graph asks for while it runs: operators that no compiler looks into.

Traced into the graph, a match would be made at every step, and without the kernels. So the graph asks: eager code
matches, renews or finds what it has kept, as in a UNet that is not compiled, and the graph gets copies. One graph
serves all of that, at any time of any sampling, so a compiler has nothing to make anew.
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

_log = logging.getLogger(__name__)
_SCHEMAS = {
    # site: whose `begins` is asked. latent, stamp: arguments of the UNet's call
    "begin": "(Tensor site, Tensor latent, Tensor? stamp) -> Tensor",
    # begun: what `begin` gave, so that it comes first. site: whose `answers` is asked, with what follows
    "plans": "(Tensor begun, Tensor site, Tensor x, Tensor? stamp, Tensor[] whole, str rule, str part, bool together, "
    "int height, int width, int[] integers, int[] sizes, int[] correction, ScalarType dtype) -> Tensor[]",
}
# One of them for a process, whatever copies of this engine it holds or lets go: torch takes a namespace once. The
# number is raised with any change of what stands behind the operators.
_NAMESPACE = "tome_core_1"
_PLACE = f"_{_NAMESPACE}_operators"
_BEGIN: Any = None  # torch's operators, from the first site on
_PLANS: Any = None


def number_of(site: Any) -> torch.Tensor:
    """A number by which a graph names the site: int64 ``[1]`` on the CPU.

    As a tensor it is an input of the graph, which then serves all sites that look alike.
    """
    global _BEGIN, _PLANS
    shared = sys.modules.get(_PLACE) or sys.modules.setdefault(_PLACE, _nothing_yet())
    if shared.library is None:
        shared.library = _defined(shared.sites)
    if shared.library is not None:
        operators = getattr(torch.ops, _NAMESPACE)
        _BEGIN, _PLANS = operators.begin.default, operators.plans.default
    number = next(shared.numbers)
    shared.sites[number] = site
    with torch.inference_mode(False):
        return torch.tensor([number], device="cpu")


def are_there() -> bool:
    """Whether a graph can ask."""
    return _BEGIN is not None


def begin(site: torch.Tensor, latent: torch.Tensor, stamp: torch.Tensor | None) -> torch.Tensor:
    """A call of a UNet that is compiled as a whole begins, the site's. Returns what `plans` of that call are given."""
    return _BEGIN(site, latent, stamp)


def plans(
    begun: torch.Tensor, site: torch.Tensor, x: torch.Tensor, stamp: torch.Tensor | None, whole: Sequence[torch.Tensor],
    asked: tuple[str, str, bool, int, int], integers: list[int], sizes: list[int], correction: list[int],
    dtype: torch.dtype,
) -> list[torch.Tensor]:  # fmt: skip
    """The site's answer: for each plan int64 ``[integers]`` and float32 ``[sizes]``, then ``correction`` of ``dtype``.

    begun: of the call, or the site itself where the UNet is not compiled. asked: rule, part, together, height, width.
    """
    return _PLANS(begun, site, x, stamp, list(whole), *asked, integers, sizes, correction, dtype)


def _nothing_yet() -> ModuleType:
    made = ModuleType(_PLACE)
    made.sites, made.numbers, made.library = weakref.WeakValueDictionary(), itertools.count(), None
    return made


def _defined(sites: weakref.WeakValueDictionary[int, Any]) -> torch.library.Library | None:
    """None where torch cannot be told of them, which is tried again at the next site.

    It looks through all modules there are, and a host may hold one that raises when it is looked at.
    """
    library = torch.library.Library(_NAMESPACE, "DEF")
    try:
        _define(library, sites)
    except Exception as error:
        library._destroy()
        _log.debug("compiled graphs match anew at every step: %s: %s", type(error).__name__, error)
        return None
    return library


def _define(library: torch.library.Library, sites: weakref.WeakValueDictionary[int, Any]) -> None:
    def run_begin(site: torch.Tensor, latent: torch.Tensor, stamp: torch.Tensor | None) -> torch.Tensor:
        sites[int(site)].begins(latent, stamp)
        return site.clone()

    def run_plans(begun: torch.Tensor, site: torch.Tensor, *rest: Any) -> list[torch.Tensor]:
        x, stamp, whole, rule, part, together, height, width, *_ = rest
        return sites[int(site)].answers(x, stamp, whole, rule, part, together, height, width)

    tags = [getattr(torch.Tag, tag) for tag in ("pt2_compliant_tag", "cudagraph_unsafe") if hasattr(torch.Tag, tag)]
    for one, schema in _SCHEMAS.items():
        library.define(one + schema, tags=tags)
    for one, run, shapes in (("begin", run_begin, _shape_of_begin), ("plans", run_plans, _shapes_of_plans)):
        library.impl(one, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{_NAMESPACE}::{one}", shapes, lib=library)


def _shape_of_begin(site: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(site)


def _shapes_of_plans(
    begun: torch.Tensor, site: torch.Tensor, x: torch.Tensor, stamp: torch.Tensor | None, whole: list[torch.Tensor],
    rule: str, part: str, together: bool, height: int, width: int,
    integers: list[int], sizes: list[int], correction: list[int], dtype: torch.dtype,
) -> list[torch.Tensor]:  # fmt: skip
    found = []
    for length, count in zip(integers, sizes, strict=True):
        found += [x.new_empty(length, dtype=torch.int64), x.new_empty(count, dtype=torch.float32)]
    return [*found, x.new_empty(correction, dtype=dtype)]
