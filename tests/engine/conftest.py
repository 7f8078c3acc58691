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
    """The function `tests.small_models.sd_pipelines.make`, imported only when a test needs a pipeline of diffusers."""
    from tests.small_models import sd_pipelines

    return partial(sd_pipelines.make, words)


@pytest.fixture
def pipe(tiny_folder):
    from tests.small_models.sd_pipelines import read_folder

    return read_folder(tiny_folder)
