"""How much the long tests do: a little, or all (500 generations, every wrap, all things on all models, 5,000 sessions):
``TOME_THOROUGH=1 python -m pytest tests -k 'soak or interrupt or beside or random'``."""

import os
from collections.abc import Iterable

import pytest

THOROUGH = os.environ.get("TOME_THOROUGH") == "1"


def some_quick(values: Iterable, quick: int = 1) -> list:
    """Parameters of which the first few are for the quick tier, and the others are slow further cases of a law."""
    return [pytest.param(value, marks=[pytest.mark.slow] * (place >= quick)) for place, value in enumerate(values)]
