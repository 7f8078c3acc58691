"""Beside other people's extensions, in a real webui.

WEBUI_EXTENSIONS_DIR: a folder with their checkouts, whose names begin as in FOLDERS. What they need has to be in the
webui's Python. ADetailer's detector is a stand-in, which the probe extension brings, because random weights draw no
faces.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.hosts.webui.running import HALF, SAVED, picture_to_start_from, serve_twins

FOLDERS = ("sd-webui-controlnet", "adetailer", "multidiffusion-upscaler", "ultimate-upscale")
PICTURE = picture_to_start_from()


@pytest.fixture(scope="module")
def neighbours(checkout, checkpoints, tmp_path_factory):
    """Twins that have all extensions that are there."""
    named = os.environ.get("WEBUI_EXTENSIONS_DIR")
    if not named:
        pytest.skip("needs other extensions: set WEBUI_EXTENSIONS_DIR to a folder with their checkouts")
    folders = [folder for folder in sorted(Path(named).iterdir()) if folder.name.startswith(FOLDERS)]
    with serve_twins(checkout, checkpoints, tmp_path_factory.mktemp("beside"), extensions=folders) as twins:
        yield twins


@pytest.fixture
def beside(neighbours):
    """Gives the twins if they have an extension, and it is to be used in this webui."""

    def beside(name):
        if not any(folder.startswith(name) for folder in os.listdir(os.environ["WEBUI_EXTENSIONS_DIR"])):
            pytest.skip(f"no {name}* in WEBUI_EXTENSIONS_DIR")
        if neighbours.webui.kind != "a1111" and name != "ultimate-upscale":
            pytest.skip(f"{neighbours.webui.kind} has its own in place of {name}")
        return neighbours

    return beside


def test_controlnets_reference_mode_and_what_it_leaves_behind(beside):
    twins = beside("sd-webui-controlnet")
    unit = {"enabled": True, "module": "reference_adain+attn", "model": "None", "image": PICTURE, "weight": 1.0,
            "threshold_a": 0.5, "processor_res": 512}  # fmt: skip
    job = {"alwayson_scripts": {"controlnet": {"args": [unit]}}}
    assert twins.without.draw_once(**job).pixels != twins.without.draw_once().pixels
    assert " of attention left out" in twins.law(HALF, **job)
    assert SAVED in twins.law(HALF)


def test_adetailers_inner_jobs_merge_only_if_its_settings_name_us(beside):
    twins = beside("adetailer")
    unit = {"ad_model": "mediapipe_face_short", "ad_inpaint_only_masked": True, "ad_inpaint_only_masked_padding": 8}
    job = {"alwayson_scripts": {"ADetailer": {"args": [True, False, unit]}}, "n_iter": 2}
    assert twins.without.draw_once(**job).pixels != twins.without.draw_once(n_iter=2).pixels
    for more, inner in (({}, 0), ({"override_settings": {"ad_script_names": "token_merging"}}, 2)):
        start = len(twins.webui.log_text())
        assert f"6 steps, {SAVED}" in twins.law(HALF, **job, **more)
        lines = twins.webui.our_lines(start)
        assert len(lines) == 1 + inner and all(SAVED in line for line in lines)


def test_tiled_diffusions_tiles(beside):
    twins = beside("multidiffusion-upscaler")
    tiles = {f"Latent_tile_{name}": value for name, value in (("width", 16), ("height", 16), ("overlap", 4))}
    values = twins.without.values_of("tiled diffusion", Tiled_Diffusion=True, Method="MultiDiffusion", **tiles)
    job = {"alwayson_scripts": {"Tiled Diffusion": {"args": values}}, "width": 192}
    assert twins.without.draw_once(**job).pixels != twins.without.draw_once(width=192).pixels
    assert SAVED in twins.law(HALF, **job)


def test_ultimate_upscales_tiles(beside):
    twins = beside("ultimate-upscale")
    # by position: tile 128x128, mask blur, padding; seams; upscaler, redraw mode; twice the picture's size
    values = ["", 128, 128, 8, 16, 64, 0.35, 16, 0, True, 0, False, 4, 0, 2, 256, 256, 2]
    job = {"path": "img2img", "init_images": [PICTURE], "denoising_strength": 0.6,
           "script_name": "ultimate sd upscale", "script_args": values}  # fmt: skip
    for webui in twins:  # the first one of a process differs, without us too: it is encoded with unseeded noise
        webui.draw(**job)
    start = len(twins.webui.log_text())
    assert SAVED in twins.law(HALF, **job)
    assert len(twins.webui.our_lines(start)) >= 4
