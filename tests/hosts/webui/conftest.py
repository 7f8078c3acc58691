"""Two servers for all tests of this folder, one without our extension; skipped without WEBUI_DIR, a checkout of A1111,
Forge or reForge. WEBUI_PYTHON: the Python that runs it. WEBUI_FLAGS: replace the flags for a CPU. Without a network
CLIP's tokenizer has to be in the Hugging Face cache (HF_HOME). The user's files are not touched."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hosts.webui.make_checkpoint import make
from tests.hosts.webui.running import Twins, Webui, kind_of, serve_twins


@pytest.fixture(scope="session")
def checkout() -> Path:
    """The checkout that WEBUI_DIR names."""
    named = os.environ.get("WEBUI_DIR")
    if not named:
        pytest.skip("needs a webui: set WEBUI_DIR (and WEBUI_PYTHON, the Python that runs it)")
    return Path(named)


@pytest.fixture(scope="session")
def checkpoints(checkout, tmp_path_factory) -> Iterator[Path]:
    """A folder with the checkpoint `first`, the same as `second` for the refiner, and `other` weights."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for seed, name in enumerate(("first", "other"), 1):
        make(folder / f"{name}.safetensors", checkout, seed, is_narrow=kind_of(checkout) == "a1111")
    for file in list(folder.glob("first.*")):  # the weights, and in A1111 their configuration
        (folder / f"second{file.suffix}").symlink_to(file)
    yield folder
    shutil.rmtree(folder)  # half a gigabyte, and pytest keeps the folders of three runs


@pytest.fixture(scope="session")
def twins(checkout, checkpoints, tmp_path_factory) -> Iterator[Twins]:
    """The running servers, without and with our extension."""
    with serve_twins(checkout, checkpoints, tmp_path_factory.mktemp("webui")) as servers:
        assert servers.without.draw().pixels == servers.without.draw_once().pixels, "it draws the same picture again"
        yield servers


@pytest.fixture(scope="session")
def webui(twins) -> Webui:
    return twins.webui


@pytest.fixture(scope="session")
def without(twins) -> Webui:
    return twins.without
