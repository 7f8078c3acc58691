"""Whatever stands beside us, on whatever model, whoever came first: the picture is right, or is left alone and named.

Foreign things (`tests.beside.things`) times models (`tests.beside.models`) times orders: a case is named after all
three. And a few random pairs of things; thousands by `python -m tests.beside`.
"""

from __future__ import annotations

from typing import Any
from zlib import crc32

import pytest

from tests.beside.__main__ import run
from tests.beside.laws import Case, hold
from tests.beside.models import MODELS, QUICK, Beside
from tests.beside.things import THINGS
from tests.thoroughness import THOROUGH, some_quick

# who comes before us, who leaves before us; and the models that have such cases in a quick run, the first that fits
ORDERS = {"it came last and leaves first": (0, 1, "Wan"), "it came first and leaves last": (1, 0, "sd15"),
          "it came and leaves first": (1, 1, "ldm"), "it came and leaves last": (0, 0, "Qwen-Image")}  # fmt: skip
SHARE = 20  # of the other models, every so many-th case; in a thorough run all


def _cases() -> list[Any]:
    things_of = {name: [thing for thing in THINGS if THINGS[thing].fits(beside)]
                 for name, beside in ((name, Beside(name)) for name in MODELS)}  # fmt: skip
    cases = []
    for order, (before, after, model) in ORDERS.items():
        for thing in THINGS:
            fitting = [name for name in (model, *QUICK, *MODELS) if thing in things_of.get(name, ())]
            for name in dict.fromkeys(fitting):
                is_first = name == fitting[0]
                if is_first or THOROUGH or crc32(f"{order} {thing} {name}".encode()) % SHARE == 0:
                    cases.append(pytest.param(
                        Case(name, (thing,), before, after), id=f"{thing}-{name}-{order}",
                        marks=[pytest.mark.slow] * (not is_first or THINGS[thing].is_slow)))  # fmt: skip
    return cases


@pytest.mark.parametrize("case", _cases())
def test_the_picture_is_right_or_is_left_alone_and_nothing_of_us_stays(case: Case):
    assert hold(case)


@pytest.mark.parametrize("number", some_quick(range(24), 6))
def test_with_two_things_as_well(number: int):
    assert run(1, number)
