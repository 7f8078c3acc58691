"""A narrow SDXL in A1111, which takes its size from a configuration; the Forges know SDXL in its own size alone."""

from __future__ import annotations

import pytest

from tests.hosts.webui.make_sdxl import make
from tests.hosts.webui.running import TWICE, kind_of
from tests.hosts.webui.twins import serve_twins

ON = (True, 0.5)
SIZE = {"width": 256, "height": 256, "steps": 2}


@pytest.fixture(scope="module")
def sdxl(checkout, tmp_path_factory):
    """Twins that run it."""
    if kind_of(checkout) != "a1111":
        pytest.skip("needs A1111: SDXL in its own size is too much for a test")
    folder = tmp_path_factory.mktemp("sdxl")
    make(folder / "first.safetensors")
    with serve_twins(checkout, folder, tmp_path_factory.mktemp("webui")) as running:
        yield running


def test_its_finest_attention_is_at_half_the_latents_size(sdxl):
    assert "level 0 (/2) 256 -> 128 tokens, 75% of its attention saved, 2 steps" in sdxl.law(*ON, **SIZE)
    line = sdxl.law(*ON, "only hires", hires=True, **SIZE)
    assert line.startswith("first pass: left alone; hires pass: level 0 (/2) 576 -> 288 tokens")


def test_a_preset_merges_where_the_picture_is_large(sdxl):
    line = sdxl.law(True, "balanced", **TWICE, steps=2)
    assert line.startswith("level 0 (/2) ") and "of its attention saved" in line and "MLP" not in line
    assert "nothing merged: " in sdxl.law(True, "balanced", **SIZE, merges=False)


def test_up_to_1_reaches_nothing_and_says_so(sdxl):
    line = sdxl.law(*ON, "same", 0.5, "up to /1", **SIZE, merges=False)
    assert line.startswith("nothing merged: ") and "/2" in line
