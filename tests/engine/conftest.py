"""What tests of several rooms of the engine ask for by name."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def fresh_compiler():
    """For a module that compiles: `pytestmark = pytest.mark.usefixtures("fresh_compiler")`."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
