"""What tests of several nodes ask for by name."""

from __future__ import annotations

import sys

import pytest

from tests.comfy_doubles import Server


@pytest.fixture
def server(monkeypatch) -> Server:
    """ComfyUI's, to which nodes show their texts."""
    one = Server()
    monkeypatch.setitem(sys.modules, "server", one.module())
    return one
