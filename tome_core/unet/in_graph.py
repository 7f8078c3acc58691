"""What a compiled graph asks for while it runs: operators that no compiler looks into.

Traced into the graph, a match would be made at every step, and without the kernels. So eager code matches, renews or
finds what it has kept, as in a UNet that is not compiled, and one graph gets copies at any time of any sampling.
"""

from __future__ import annotations

from typing import Any

import torch

from ..running.operators import Operator, Operators, Sites, empty_like_site


def _run_begin(sites: Sites, site: torch.Tensor, latent: torch.Tensor, stamp: torch.Tensor | None) -> torch.Tensor:
    sites[int(site)].begins(latent, stamp)
    return site.clone()


def _run_plans(sites: Sites, begun: torch.Tensor, site: torch.Tensor, *rest: Any) -> list[torch.Tensor]:
    x, stamp, whole, rule, part, together, height, width, *_ = rest
    return sites[int(site)].answers(x, stamp, whole, rule, part, together, height, width)


def _shapes_of_plans(begun: torch.Tensor, site: torch.Tensor, x: torch.Tensor, *rest: Any) -> list[torch.Tensor]:
    integers, sizes, correction, dtype = rest[-4:]
    found = []
    for length, count in zip(integers, sizes, strict=True):
        found += [x.new_empty(length, dtype=torch.int64), x.new_empty(count, dtype=torch.float32)]
    return [*found, x.new_empty(correction, dtype=dtype)]


OPERATORS = Operators(
    "tome_core_1",
    "compiled graphs match anew at every step",
    # A call of a UNet that is compiled as a whole begins. site: whose `begins` is asked. latent, stamp: its arguments
    begin=Operator("(Tensor site, Tensor latent, Tensor? stamp) -> Tensor", _run_begin, empty_like_site),
    # For each plan int64 `[integers]` and float32 `[sizes]`, then `correction` of `dtype`. begun: what `begin` gave, so
    # that it comes first, or the site itself where the UNet is not compiled. site: whose `answers` is asked, with what
    # follows
    plans=Operator(
        "(Tensor begun, Tensor site, Tensor x, Tensor? stamp, Tensor[] whole, str rule, str part, bool together, "
        "int height, int width, int[] integers, int[] sizes, int[] correction, ScalarType dtype) -> Tensor[]",
        _run_plans, _shapes_of_plans,
    ),
)  # fmt: skip
