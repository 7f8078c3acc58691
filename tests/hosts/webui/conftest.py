"""Two servers for all tests of this folder, one of them without us; skipped if WEBUI_DIR is not set.

WEBUI_DIR: a checkout of A1111, Forge or reForge with its dependencies. WEBUI_PYTHON: the Python that runs it.
WEBUI_CHECKPOINT: a checkpoint that it can load; without it a small one with random weights is made. WEBUI_FLAGS:
replace the flags for a CPU. A webui takes CLIP's tokenizer from the Hugging Face cache, so without a network it has to
be there (HF_HOME). The user's settings, extensions and pictures are not touched.
"""

from __future__ import annotations

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
    """A folder with one checkpoint under two names, for the refiner, and `other` weights if the first were made."""
    folder = tmp_path_factory.mktemp("checkpoints")
    given = os.environ.get("WEBUI_CHECKPOINT")
    if given:
        _link(Path(given), folder / "first")
    else:
        for seed, name in enumerate(("first", "other"), 1):
            make(folder / f"{name}.safetensors", checkout, seed, is_narrow=kind_of(checkout) == "a1111")
    _link(folder / "first.safetensors", folder / "second")
    yield folder
    shutil.rmtree(folder)  # half a gigabyte, and pytest keeps the folders of three runs


@pytest.fixture
def other(checkpoints) -> str:
    """The name of a checkpoint with other weights in the first one's layout."""
    if not (checkpoints / "other.safetensors").exists():
        pytest.skip("needs a second checkpoint of the same layout, which is made if WEBUI_CHECKPOINT is not set")
    return "other"


def _link(source: Path, target: Path) -> None:
    for suffix in (".safetensors", ".yaml"):  # the configuration, if the layout is not SD1.5's own
        if source.with_suffix(suffix).exists():
            target.with_suffix(suffix).symlink_to(source.with_suffix(suffix))


@pytest.fixture(scope="session")
def twins(checkout, checkpoints, tmp_path_factory) -> Iterator[Twins]:
    """The running servers, without us and with us."""
    with serve_twins(checkout, checkpoints, tmp_path_factory.mktemp("webui")) as servers:
        assert servers.without.draw().pixels == servers.without.draw_once().pixels, "it draws the same picture again"
        yield servers


@pytest.fixture(scope="session")
def webui(twins) -> Webui:
    """The running server, with us."""
    return twins.webui


@pytest.fixture(scope="session")
def without(twins) -> Webui:
    """The running server, without us."""
    return twins.without
