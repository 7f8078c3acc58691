"""Every family of models as cases of a test, and how far apart two of their pictures lie."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch

from tests import tiny_transformers
from tests.models import CASES, call_case

_OF_ITS_OWN = ("ldm_sd1", "sgm_double", "comfy_double", "sd15", "sdxl", "gligen", "motion")

# most laws' cases: one of each wiring is quick; what differs from it in weights or arguments alone is slow
every_family_in_time = pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[pytest.mark.slow] * (case.name not in _OF_ITS_OWN)) for case in CASES],
    ids=lambda case: case.name,
)


class Family(NamedTuple):
    """A UNet or a transformer. build: makes the model, its weights always the same; call: its picture, at a time."""

    name: str
    build: Callable[[], Any]
    call: Callable[..., torch.Tensor]


UNETS = [Family(case.name, case.build, partial(call_case, case)) for case in CASES]
TRANSFORMERS = [
    Family(name, partial(tiny_transformers.build, name), partial(tiny_transformers.call_at, name))
    for name in tiny_transformers.PRESENT
]
MODELS = {one.name: one for one in (*UNETS, *TRANSFORMERS)}
_QUICK = (*_OF_ITS_OWN, "Flux", "SD3.5", "Z-Image", "Wan")
every_model = pytest.mark.parametrize(
    "one",
    [pytest.param(one, marks=[pytest.mark.slow] * (name not in _QUICK)) for name, one in MODELS.items()],
    ids=lambda one: one.name,
)


def some_models(*names: str) -> Any:
    """These alone, those that this diffusers lacks left out; the first of either kind quick."""
    known = [MODELS[name] for name in names if name in MODELS]
    quick = [next((one for one in known if (one in TRANSFORMERS) == is_one), None) for is_one in (False, True)]
    return pytest.mark.parametrize(
        "one", [pytest.param(one, marks=[pytest.mark.slow] * (one not in quick)) for one in known],
        ids=lambda one: one.name,
    )  # fmt: skip


def largest_difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """Between values at the same place."""
    return (one - other).abs().max().item()
