"""Beside other people's extensions, in a real webui.

WEBUI_EXTENSIONS_DIR: a folder with their checkouts, whose names begin as in FOLDERS. What they need has to be in the
webui's Python. ADetailer's detector is a stand-in, which the probe extension brings, because random weights draw no
faces.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from PIL import Image

from tests.hosts.webui.running import HALF, SAVED, as_text
from tests.hosts.webui.twins import serve_twins

FOLDERS = ("sd-webui-controlnet", "adetailer", "multidiffusion-upscaler", "ultimate-upscale")
PICTURE = as_text(Image.linear_gradient("L").rotate(30).resize((128, 128)))


@pytest.fixture(scope="module")
def neighbours(checkout, checkpoints, tmp_path_factory):
    """Folder name's beginning -> twins that have all that were found."""
    named = os.environ.get("WEBUI_EXTENSIONS_DIR")
    if not named:
        pytest.skip("needs other extensions: set WEBUI_EXTENSIONS_DIR to a folder with their checkouts")
    found = [one for one in sorted(Path(named).iterdir()) if one.name.startswith(FOLDERS)]
    with serve_twins(checkout, checkpoints, tmp_path_factory.mktemp("beside"), extensions=found) as running:
        yield {name: running for name in FOLDERS if any(one.name.startswith(name) for one in found)}


def _beside(neighbours, name):
    if name not in neighbours:
        pytest.skip(f"no {name}* in WEBUI_EXTENSIONS_DIR")
    twins = neighbours[name]
    if twins.webui.kind != "a1111" and name != "ultimate-upscale":
        pytest.skip(f"{twins.webui.kind} has its own in place of {name}")
    return twins


def _reference(module, **more):
    unit = {"enabled": True, "module": module, "model": "None", "image": PICTURE, "weight": 1.0,
            "threshold_a": 0.5, "processor_res": 512, **more}  # fmt: skip
    return {"alwayson_scripts": {"controlnet": {"args": [unit]}}}


@pytest.mark.parametrize("module", ["reference_only", "reference_adain", "reference_adain+attn"])
def test_controlnets_reference_mode_and_what_it_leaves_behind(neighbours, module):
    twins = _beside(neighbours, "sd-webui-controlnet")
    plain = twins.without.draw_once()
    job = _reference(module)
    assert twins.without.draw_once(**job).pixels != plain.pixels
    assert " of attention left out" in twins.law(HALF, **job)
    assert SAVED in twins.law(HALF)
    assert twins.webui.draw().pixels == plain.pixels


def test_controlnets_reference_mode_in_both_passes(neighbours):
    twins = _beside(neighbours, "sd-webui-controlnet")
    job = {**_reference("reference_only"), "hires": True}
    assert "hires pass: left alone" in twins.law({**HALF, "where": "first pass"}, **job)
    assert "first pass: left alone" in twins.law({**HALF, "where": "hires pass"}, **job)


UNIT = {"ad_model": "mediapipe_face_short", "ad_inpaint_only_masked": True, "ad_inpaint_only_masked_padding": 8}
DETAILED = {"alwayson_scripts": {"ADetailer": {"args": [True, False, UNIT]}}}


def test_adetailers_inner_jobs_do_not_merge_by_themselves(neighbours):
    twins = _beside(neighbours, "adetailer")
    assert twins.without.draw_once(**DETAILED).pixels != twins.without.draw_once().pixels
    start = len(twins.webui.said())
    assert f"3 steps, {SAVED}" in twins.law(HALF, **DETAILED)
    assert len(twins.webui.told(start)) == 1
    assert "6 steps" in twins.law(HALF, **DETAILED, n_iter=2)


def test_adetailers_inner_jobs_merge_where_its_settings_name_us(neighbours):
    twins = _beside(neighbours, "adetailer")
    job = {**DETAILED, "n_iter": 2, "override_settings": {"ad_script_names": "token_merging"}}
    start = len(twins.webui.said())
    assert f"6 steps, {SAVED}" in twins.law(HALF, **job)
    inner = twins.webui.told(start)[:-1]
    assert len(inner) == 2 and all(SAVED in line for line in inner)


@pytest.mark.parametrize("method", ["MultiDiffusion", "Mixture of Diffusers"])
def test_tiled_diffusions_tiles(neighbours, method):
    twins = _beside(neighbours, "multidiffusion-upscaler")
    tiles = {f"Latent_tile_{name}": value for name, value in (("width", 16), ("height", 16), ("overlap", 4))}
    values = twins.without.values_of("tiled diffusion", Tiled_Diffusion=True, Method=method, **tiles)
    job = {"alwayson_scripts": {"Tiled Diffusion": {"args": values}}, "width": 192}
    assert twins.without.draw_once(**job).pixels != twins.without.draw_once(width=192).pixels
    assert SAVED in twins.law(HALF, **job)


def test_ultimate_upscales_tiles(neighbours):
    twins = _beside(neighbours, "ultimate-upscale")
    # by position: tile 128x128, mask blur, padding; seams; upscaler, redraw mode; twice the picture's size
    values = ["", 128, 128, 8, 16, 64, 0.35, 16, 0, True, 0, False, 4, 0, 2, 256, 256, 2]
    job = {"path": "img2img", "init_images": [PICTURE], "denoising_strength": 0.6,
           "script_name": "ultimate sd upscale", "script_args": values}  # fmt: skip
    for webui in twins:  # the first one of a process differs, without us too: it is encoded with unseeded noise
        webui.draw(**job)
    start = len(twins.webui.said())
    assert SAVED in twins.law(HALF, **job)
    assert len(twins.webui.told(start)) >= 4
