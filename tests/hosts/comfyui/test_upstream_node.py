"""In a real ComfyUI: the node that `upstream/comfyui` offers, in the place of ComfyUI's own."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.hosts.comfyui.graphs import Graph, bytes_of
from tests.hosts.comfyui.running import ROOT, serve

SEED = 5


@pytest.fixture(scope="module")
def with_ours(checkout, base, tmp_path_factory):
    """A server of a copy of the checkout that has our file."""
    copy = tmp_path_factory.mktemp("upstream") / "comfyui"
    left_out = {".git", "models", "custom_nodes", "output"}  # of the checkout itself; inside there are others
    shutil.copytree(checkout, copy, symlinks=True,
                    ignore=lambda folder, names: left_out & {*names} if Path(folder) == checkout else ())  # fmt: skip
    shutil.copy(ROOT / "upstream" / "comfyui" / "nodes_tomesd.py", copy / "comfy_extras")
    with serve(copy, base) as running:
        yield running


def draw(comfy, model: str, size: tuple[int, int], ratio: float | None) -> list[str]:
    """None: without the node."""
    comfy.forget()
    graph = Graph(model, size, steps=1)
    graph.seed = SEED
    patched = None if ratio is None else graph.add("TomePatchModel", model=graph.model, ratio=ratio)
    graph.sample("drawn", patched)
    return bytes_of(comfy.good(graph.graph), "drawn")


@pytest.mark.parametrize("model, size", [("sd1", (128, 128)), ("sdxl", (128, 128)), ("sd1", (136, 264))])
def test_it_merges_and_is_off_at_ratio_0(with_ours, model: str, size: tuple[int, int]):
    plain, merged = draw(with_ours, model, size, None), draw(with_ours, model, size, 0.75)
    assert plain != merged
    assert draw(with_ours, model, size, 0.0) == plain
    assert draw(with_ours, model, size, 0.75) == merged
    assert draw(with_ours, model, size, 1.0) not in (plain, merged)
