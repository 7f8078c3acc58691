"""In a real A1111: what `upstream/a1111` offers, in the place of tomesd. Needs git."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.hosts.webui.make_sdxl import make
from tests.hosts.webui.running import ROOT, kind_of, serve

PATCH = ROOT / "upstream" / "a1111" / "token_merging.patch"
SIZE = {"width": 256, "height": 256, "steps": 2}
TOUCHED = ("modules/sd_models.py", "requirements.txt", "requirements_versions.txt")


@pytest.fixture(scope="module")
def patched(checkout, tmp_path_factory):
    """A copy of the checkout with the patch."""
    if kind_of(checkout) != "a1111":
        pytest.skip("needs A1111: the Forges merge elsewhere")
    copy = tmp_path_factory.mktemp("upstream") / "webui"
    left_out = {".git", "extensions", "outputs"}
    shutil.copytree(checkout, copy, symlinks=True,
                    ignore=lambda folder, names: left_out & {*names} if Path(folder) == checkout else ())  # fmt: skip
    (copy / "extensions").mkdir()
    for name in TOUCHED:  # forks have other line ends
        (copy / name).write_bytes((copy / name).read_bytes().replace(b"\r\n", b"\n"))
    subprocess.run(["git", "apply", "--unidiff-zero", PATCH], cwd=copy, check=True)
    return copy


@pytest.mark.parametrize("kind", ["sd1", "sdxl"])
def test_it_merges_and_comes_off(patched, checkpoints, tmp_path, kind: str):
    if kind == "sdxl":
        checkpoints = tmp_path / "sdxl"
        checkpoints.mkdir()
        make(checkpoints / "first.safetensors")
    with serve(patched, checkpoints, tmp_path / "webui", False) as webui:

        def draw(ratio: float) -> bytes:
            return webui.draw(**SIZE, override_settings={"token_merging_ratio": ratio}).pixels

        plain, merged = draw(0.0), draw(0.5)
        assert plain != merged
        assert draw(0.0) == plain and draw(0.5) == merged
