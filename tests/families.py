"""Every family of models as cases of a test, and how far apart two of their pictures lie."""

from __future__ import annotations

import pytest
import torch

from tests.models import CASES

every_family = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
_OF_ITS_OWN = ("ldm_sd1", "sgm_double", "comfy_double", "sd15", "sdxl", "gligen", "ada_norm_zero", "motion")


# most laws' cases: one of each wiring is quick; what differs from it in weights or arguments alone is slow
every_family_in_time = pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[pytest.mark.slow] * (case.name not in _OF_ITS_OWN)) for case in CASES],
    ids=lambda case: case.name,
)


def largest_difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """Between values at the same place."""
    return (one - other).abs().max().item()
