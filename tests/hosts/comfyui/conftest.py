"""One server for all tests of this folder; without COMFYUI_DIR they are skipped."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hosts.comfyui.running import make_base, serve


@pytest.fixture(scope="session")
def checkout() -> Path:
    """The checkout that COMFYUI_DIR names."""
    named = os.environ.get("COMFYUI_DIR")
    if not named:
        pytest.skip("needs a ComfyUI checkout: set COMFYUI_DIR (and COMFYUI_PYTHON, the Python that runs it)")
    return Path(named)


@pytest.fixture(scope="session")
def base(checkout, tmp_path_factory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("comfyui")
    make_base(checkout, folder)
    yield folder
    shutil.rmtree(folder / "models")  # models are large, and pytest keeps the folders of three runs


@pytest.fixture(scope="session")
def comfy(checkout, base):
    with serve(checkout, base) as running:
        yield running
