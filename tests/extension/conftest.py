"""The webui of a test; a file, or a test, sets its flavours."""

import logging

import pytest

from tests.host_doubles.webuis import SdNext, Webui, merges


@pytest.fixture
def flavour() -> str:
    """A1111, unless a test sets another flavour."""
    return "a1111"


@pytest.fixture
def webui(flavour, monkeypatch):
    """A running webui; after the test nothing has failed and nothing is left on its model."""
    webui = (SdNext if flavour == "sdnext" else Webui)(monkeypatch, flavour).start()
    yield webui
    assert not webui.errors
    assert not merges(webui.unet), "something was left on the model"
    webui.call("script_unloaded")


@pytest.fixture
def log(webui):
    """Our loggers' output on the webui's console, which puts our name before each line."""
    lines, doubled, ours = [], [], logging.getLogger("_tome_core_webui")
    listener = logging.Handler()

    def emit(record):
        lines.append(record.getMessage())
        doubled.extend(line for line in lines[-1:] if line.startswith("ToMe"))

    listener.emit = emit
    ours.addHandler(listener)
    yield lines
    ours.removeHandler(listener)
    assert not doubled
