"""The webui that a test asks for by name; a file, or a test, says of which flavours."""

from __future__ import annotations

import pytest

from tests.webui_doubles import Processing, Webui, merges


@pytest.fixture
def flavour() -> str:
    """A1111, where nobody says another."""
    return "a1111"


@pytest.fixture
def webui(flavour, monkeypatch):
    """One that runs; afterwards nothing has failed and nothing is left on its model."""
    made = Webui(monkeypatch, flavour).start()
    yield made
    assert not made.errors
    assert made.shared.sd_model is None or not merges(made.unet), "something was left on the model"
    made.call("script_unloaded")


@pytest.fixture
def small(monkeypatch):
    """Pictures of 8 x 8 tokens, 12 x 12 in the hires pass."""
    monkeypatch.setattr(Processing, "size", 8)
