"""The merge map shows what the first picture's prompt merged, however many pictures and prompts there are."""

from __future__ import annotations

import pytest
from PIL import Image

from tests.webui_doubles import FLAVOURS, custom


@pytest.fixture(autouse=True)
def asked_for(webui):
    webui.shared.opts.data["tome_map"] = True


def map_of(webui, **more):
    return webui.job(custom(), **more).images[-1].tobytes()


def test_the_map_is_one_more_picture_and_changes_none(webui):
    webui.shared.opts.data["tome_map"] = False
    without = webui.job(custom(), enable_hr=True)
    webui.shared.opts.data["tome_map"] = True
    done = webui.job(custom(), enable_hr=True)
    assert done.latents.equal(without.latents) and len(done.images) == len(without.images) + 1
    assert done.images[-1].size == done.images[0].size and len(done.images[-1].getcolors(4096)) > 20
    assert len(webui.job(False, enable_hr=True).images) == 1


@pytest.mark.parametrize("more", [{"n_iter": 2}, {"batch_size": 2}, {"n_iter": 2, "batch_size": 2}], ids=str)
@pytest.mark.parametrize("flavour", ["a1111", "forge"])
def test_of_several_pictures_it_shows_the_first(webui, more):
    assert map_of(webui, **more) == map_of(webui) != map_of(webui, seed=8)


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_it_shows_the_prompt_and_not_the_negative_prompt(webui, monkeypatch):
    """A1111 computes the prompt first, the Forges the negative prompt."""
    rows = []

    def draw(picture, maps, sample):
        rows.extend(range(found.group.shape[0])[sample] for found in maps.values())
        return Image.new("RGB", (8, 8))

    monkeypatch.setattr(webui.part("script"), "draw_map", draw)
    webui.job(custom(), batch_size=3)
    assert set(rows) == {0 if webui.flavour == "a1111" else 3}
