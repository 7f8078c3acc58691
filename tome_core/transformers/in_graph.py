"""What a compiled transformer asks for while it runs: operators in whose eager code merging is what it always is.

One begins a call, one answers an attention, from q, k and v on. Neither settings nor the time is in the graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..running.operators import Operator, Operators, Sites, empty_like_site
from .function import Options

# Compilers of older torches were not tried; 2.9's and 2.13's were.
TRIED = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 9)


def begin(site: torch.Tensor, form: str, tensors: Sequence[torch.Tensor], numbers: Sequence[int]) -> torch.Tensor:
    """A call of a transformer that is compiled as a whole begins, with arguments as of `arguments.pack`.

    Returns what `attend` of that call is given.
    """
    return OPERATORS.made["begin"](site, form, list(tensors), list(numbers))


def attend(
    begun: torch.Tensor, site: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    mask: torch.Tensor | None, options: Options,
) -> torch.Tensor:  # fmt: skip
    """The site's attention, in the form of q, k and v.

    begun: of the call, or the site itself where the transformer's own call is not compiled.
    """
    out = OPERATORS.made["attend"](begun, site, q, k, v, mask, *options)
    return out.transpose(1, 2) if options.by_head else out


def _run_begin(
    sites: Sites, site: torch.Tensor, form: str, tensors: list[torch.Tensor], numbers: list[int]
) -> torch.Tensor:
    sites[int(site)].begins(form, tensors, numbers)
    return site.clone()


def _run_attend(
    sites: Sites, begun: torch.Tensor, site: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    mask: torch.Tensor | None, *options: Any,
) -> torch.Tensor:  # fmt: skip
    asked = Options(*options)
    out = sites[int(site)].answers(int(begun) != int(site), q, k, v, mask, asked)
    return (out.transpose(1, 2) if asked.by_head else out).contiguous()


def _shape_of_attend(
    begun: torch.Tensor, site: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    mask: torch.Tensor | None, *options: Any,
) -> torch.Tensor:  # fmt: skip
    batch, first, second, _ = q.shape
    tokens, heads = (second, first) if Options(*options).by_head else (first, second)
    return q.new_empty(batch, tokens, heads, v.shape[-1])


OPERATORS = Operators(
    "tome_core_transformers_1",
    "compiled transformers do not merge",
    # site: whose `begins` is asked, with what follows
    begin=Operator(
        "(Tensor site, str form, Tensor[] tensors, SymInt[] numbers) -> Tensor", _run_begin, empty_like_site
    ),
    # begun: what `begin` gave, so that it comes first. site: whose `answers` is asked, with what follows. The output is
    # [B, S, H, d] and nobody else's
    attend=Operator(
        "(Tensor begun, Tensor site, Tensor q, Tensor k, Tensor v, Tensor? mask, bool by_head, float? scale, bool gqa, "
        "str backend) -> Tensor",
        _run_attend, _shape_of_attend,
    ),
)  # fmt: skip
