"""How much the long tests do: a little at every change, and all with

    TOME_THOROUGH=1 python -m pytest tests -k 'soak or interrupt or beside or random'

which is 500 generations in each host, faults at every single wrap, every foreign thing on every model, a thousand
pairs of such things, and five thousand random sessions.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

import pytest

THOROUGH = os.environ.get("TOME_THOROUGH") == "1"


def some_quick(values: Iterable, quick: int = 1) -> list:
    """Parameters of which the first few are for the quick tier, and the others are slow further cases of a law."""
    return [pytest.param(value, marks=[pytest.mark.slow] * (place >= quick)) for place, value in enumerate(values)]
