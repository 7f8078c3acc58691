"""Two servers for all tests of this folder, one of them without us; skipped where WEBUI_DIR is not set.

WEBUI_DIR: a checkout of A1111, Forge or reForge with its dependencies. WEBUI_PYTHON: the Python that runs it.
WEBUI_CHECKPOINT: a checkpoint that it can load; without it a small one with random weights is made. WEBUI_FLAGS:
instead of those for a CPU. A webui takes CLIP's tokenizer from the Hugging Face cache, so without a network it has to
be there (HF_HOME). The user's settings, extensions and pictures are not touched.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hosts.webui.running import serve


@pytest.fixture(scope="session")
def checkout() -> Path:
    """The checkout that WEBUI_DIR names."""
    named = os.environ.get("WEBUI_DIR")
    if not named:
        pytest.skip("needs a webui: set WEBUI_DIR (and WEBUI_PYTHON, the Python that runs it)")
    return Path(named)


@pytest.fixture(scope="session")
def checkpoints(checkout, tmp_path_factory) -> Iterator[Path]:
    """A folder with the same checkpoint under two names, for the refiner."""
    folder = tmp_path_factory.mktemp("checkpoints")
    given = os.environ.get("WEBUI_CHECKPOINT")
    if given:
        _link(Path(given), folder / "first")
    else:
        from tests.hosts.webui.make_checkpoint import make

        make(folder / "first.safetensors")
    _link(folder / "first.safetensors", folder / "second")
    yield folder
    shutil.rmtree(folder)  # half a gigabyte, and pytest keeps the folders of three runs


def _link(source: Path, target: Path) -> None:
    for suffix in (".safetensors", ".yaml"):  # the configuration, where the layout is not SD1.5's own
        if source.with_suffix(suffix).exists():
            target.with_suffix(suffix).symlink_to(source.with_suffix(suffix))


@pytest.fixture(scope="session")
def without(checkout, checkpoints, tmp_path_factory) -> dict[str, bytes]:
    """Pixels of a webui without us."""
    with serve(checkout, checkpoints, tmp_path_factory.mktemp("without"), False) as webui:
        built_in = {"override_settings": {"token_merging_ratio": 0.5}}
        return {
            "plain": webui.draw().pixels,
            "hires": webui.draw(hires=True).pixels,
            "first pass": webui.state()["upscaled"][-1:],
            "built-in": webui.draw(**built_in).pixels,
            "plain again": webui.draw().pixels,
        }


@pytest.fixture(scope="session")
def webui(checkout, checkpoints, without, tmp_path_factory):
    """The running server, with us."""
    with serve(checkout, checkpoints, tmp_path_factory.mktemp("with"), True) as running:
        yield running
