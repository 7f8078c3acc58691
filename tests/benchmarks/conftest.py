"""Scene models with random weights, as files."""

from pathlib import Path

import pytest

from demo import model, transformer
from tests.small_models import tiny_scenes


@pytest.fixture(scope="module")
def tiny_file(tmp_path_factory) -> Path:
    """The file of a small model of Stable Diffusion's layout."""
    path = tmp_path_factory.mktemp("model") / "tiny.safetensors"
    model.save(tiny_scenes.make(), path)
    return path


@pytest.fixture(scope="module")
def flux_file(tmp_path_factory) -> Path:
    """The file of a transformer with 256 tokens."""
    path = tmp_path_factory.mktemp("flux") / "flux.safetensors"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(transformer, "SIDE", transformer.TOKEN * 16)
        model.save(tiny_scenes.make(tiny_scenes.FLUX), path)
        yield path
