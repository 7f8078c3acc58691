"""Every family of models as cases of a test, and how far apart two of their pictures lie."""

from __future__ import annotations

import pytest
import torch

from tests.models import CASES

every_family = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def largest_difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """Between values at the same place."""
    return (one - other).abs().max().item()
