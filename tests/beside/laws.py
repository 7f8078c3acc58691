"""What is expected of a model on which foreign things and merging stand: its pictures without the one or the other,
what a report has counted, and how far pictures lie apart.
"""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import torch

import tome_core
from tests.beside.models import Beside
from tests.beside.things import THINGS
from tome_core.reporting.ledger import REPLACED

SETTINGS = {"strength": 0.25, "only_if_it_pays": False}
# shares of the unmerged picture: what other sums make of it; and of a thing's effect, by which it may differ merged
EQUAL, SIZE, PLACE = 1e-4, 0.1, 0.5


@cache
def unmerged(name: str, thing: str = "nothing") -> torch.Tensor:
    beside = Beside(name)
    with THINGS[thing].on(beside) as model:
        return beside.draw(model)


@cache
def calls(name: str, thing: str) -> int:
    """Of attentions, for a picture."""
    beside = Beside(name)
    if thing.startswith("compiled blocks"):  # of which a hook would make other blocks
        return beside.calls_of_attentions()
    with THINGS[thing].on(beside) as model:
        return beside.calls_of_attentions(model)


@cache
def merged(name: str) -> torch.Tensor:
    beside = Beside(name)
    with tome_core.patch(beside.whole, **SETTINGS) as handle, handle.sampling():
        return beside.draw()


def counted(report: Any) -> tuple[int, dict[str, int]]:
    """Calls of attentions that merged, and reasons for those that did not."""
    on = sum(count for level in report.levels for (part, *_), count in level.merged.items() if part == "attn")
    off = sum((Counter(level.reasons) for level in report.levels), Counter())
    for level in report.levels:
        off.update({f"attn: {why}": report.calls * level.blocks for why in level.traced})
    return on, {why: count for why, count in off.items() if why.startswith("attn: ")}


def assert_counted(report: Any, calls: int) -> None:
    """As merged, or as left with a reason; unless nothing of us is there any more that could count, or was called."""
    on, off = counted(report)
    is_told = not report.calls and REPLACED in report.headline
    assert on + sum(off.values()) >= calls or is_told or not report.patched, (on, off, calls)


def far(one: torch.Tensor, other: torch.Tensor, of: torch.Tensor) -> float:
    assert one.isfinite().all()
    return ((one - other).norm() / of.norm()).item()
