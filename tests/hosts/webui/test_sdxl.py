"""A narrow SDXL in A1111, which takes its size from a configuration; the Forges know SDXL in its own size alone."""

from __future__ import annotations

import pytest

from tests.hosts.webui.make_sdxl import make
from tests.hosts.webui.running import ASKED, HALF, TWICE, kind_of, merged_in
from tests.hosts.webui.twins import serve_twins
from tests.webui_doubles import custom

SIZE = {"width": 256, "height": 256, "steps": 2}
SAVED = "75% of attention left out"  # by half of the tokens: it has no other level


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
    assert sdxl.law(HALF, **SIZE) == f"{ASKED}, 2 steps, {SAVED}"
    assert merged_in(sdxl.webui.draw(HALF, **SIZE)) == [(2, 256, 128, 128)]
    line = sdxl.law({**HALF, "where": "hires pass"}, hires=True, **SIZE)
    assert line == f"{ASKED}; first pass: left alone; hires pass: 2 steps, {SAVED}"


def test_a_strength_merges_where_the_picture_is_large(sdxl):
    assert sdxl.law(True, 0.5, **TWICE, steps=2).endswith(" of attention left out")
    assert "nothing merged: " in sdxl.law(True, 0.5, **SIZE, merges=False)


def test_up_to_1_reaches_nothing_and_says_so(sdxl):
    line = sdxl.law(custom(level="up to /1"), **SIZE, merges=False)
    assert line.startswith(f"{ASKED}, nothing merged: ") and "/2" in line
