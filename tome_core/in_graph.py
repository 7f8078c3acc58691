"""What a compiled graph asks for while it runs: operators that no compiler looks into.

Traced into the graph, a match would be made at every step, and without the kernels. So the graph asks: eager code
matches, renews or finds what it has kept, as in a UNet that is not compiled, and the graph gets copies. One graph
serves all of that, at any time of any sampling, so a compiler has nothing to make anew.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import Any

import torch

_SCHEMAS = {
    # site: whose `begins` is asked. latent, stamp: arguments of the UNet's call
    "begin": "(Tensor site, Tensor latent, Tensor? stamp) -> Tensor",
    # begun: what `begin` gave, so that it comes first. site: whose `answers` is asked, with what follows
    "plans": "(Tensor begun, Tensor site, Tensor x, Tensor? stamp, Tensor[] whole, str rule, str part, bool together, "
    "int height, int width, int[] integers, int[] sizes, int[] correction, ScalarType dtype) -> Tensor[]",
}
_MOST = 100  # copies of this module in one process
_numbers = itertools.count()
_SITES: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def number_of(site: Any) -> torch.Tensor:
    """A number by which a graph names the site: int64 ``[1]`` on the CPU.

    As a tensor it is an input of the graph, which then serves all sites that look alike.
    """
    number = next(_numbers)
    _SITES[number] = site
    with torch.inference_mode(False):
        return torch.tensor([number], device="cpu")


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


def _begin(site: torch.Tensor, latent: torch.Tensor, stamp: torch.Tensor | None) -> torch.Tensor:
    _SITES[int(site)].begins(latent, stamp)
    return site.clone()


def _plans(
    begun: torch.Tensor, site: torch.Tensor, x: torch.Tensor, stamp: torch.Tensor | None, whole: list[torch.Tensor],
    rule: str, part: str, together: bool, height: int, width: int, *_: Any,
) -> list[torch.Tensor]:  # fmt: skip
    return _SITES[int(site)].answers(x, stamp, whole, rule, part, together, height, width)


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


def _defined() -> tuple[torch.library.Library, Any]:
    """Another copy of this module, of another host, may have the name already."""
    for number in range(_MOST):
        name = f"tome_core_{number}" if number else "tome_core"
        try:
            library = torch.library.Library(name, "DEF")
        except RuntimeError:
            if number == _MOST - 1:
                raise
            continue
        tags = [getattr(torch.Tag, tag) for tag in ("pt2_compliant_tag", "cudagraph_unsafe") if hasattr(torch.Tag, tag)]
        for one, schema in _SCHEMAS.items():
            library.define(one + schema, tags=tags)
        for one, run, shapes in (("begin", _begin, _shape_of_begin), ("plans", _plans, _shapes_of_plans)):
            library.impl(one, run, "CompositeExplicitAutograd")
            torch.library.register_fake(f"{name}::{one}", shapes, lib=library)
        return library, getattr(torch.ops, name)
    raise AssertionError


_LIBRARY, _operators = _defined()
_BEGIN, _PLANS = _operators.begin.default, _operators.plans.default
