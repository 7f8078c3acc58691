"""A small SD1.5, as a model and as a pipeline."""

from __future__ import annotations

import pytest

from tests.samplings import CASE, pipeline_of


@pytest.fixture
def model():
    return CASE.build()


@pytest.fixture
def pipe(tiny_folder):
    return pipeline_of(tiny_folder)
