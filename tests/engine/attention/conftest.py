"""What tests of diffusers' attentions ask for by name."""

from __future__ import annotations

import pytest


@pytest.fixture
def plain_xformers(monkeypatch):
    """For a module: `pytestmark = pytest.mark.usefixtures("plain_xformers")`."""
    from diffusers.models import attention_processor

    from tests.conformance import with_xformers

    with_xformers(monkeypatch, attention_processor)
