"""Fixtures for tests of several rooms of the engine."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def no_picture_is_known():
    from tome_core.hosting import gains

    gains.KNOWN.forget()
    yield
    gains.KNOWN.forget()


@pytest.fixture(scope="module")
def words(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("words")


@pytest.fixture
def build(words) -> Callable:
    """The function `tests.tiny_pipeline.make`, imported only when a test needs a pipeline of diffusers."""
    from tests import tiny_pipeline

    return partial(tiny_pipeline.make, words)


@pytest.fixture
def pipe(tiny_folder):
    """A small SD1.5 pipeline."""
    from tests.tiny_pipeline import read_folder

    return read_folder(tiny_folder)
