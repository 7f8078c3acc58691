"""A scene model with random weights, as a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from demo import model
from tests import tiny_scenes


@pytest.fixture(scope="module")
def tiny_file(tmp_path_factory) -> Path:
    """Of the small one of Stable Diffusion's layout."""
    path = tmp_path_factory.mktemp("model") / "tiny.safetensors"
    model.save(tiny_scenes.make(), path)
    return path
