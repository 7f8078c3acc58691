"""Our extension with other people's in a real webui. WEBUI_EXTENSIONS_DIR: a folder with their checkouts, named as in
FOLDERS, whose requirements the webui's Python has. The probe extension brings a stand-in for ADetailer's detector."""

import os
from pathlib import Path

import pytest

from tests.hosts.webui.running import HALF, PICTURE, SAVED, serve_twins

FOLDERS = ("sd-webui-controlnet", "adetailer", "ultimate-upscale")


@pytest.fixture(scope="module")
def neighbours(checkout, checkpoints, tmp_path_factory):
    """Twins with all extensions of the folder."""
    named = os.environ.get("WEBUI_EXTENSIONS_DIR")
    if not named:
        pytest.skip("needs other extensions: set WEBUI_EXTENSIONS_DIR to a folder with their checkouts")
    folders = [folder for folder in sorted(Path(named).iterdir()) if folder.name.startswith(FOLDERS)]
    with serve_twins(checkout, checkpoints, tmp_path_factory.mktemp("beside"), extensions=folders) as twins:
        yield twins


def beside(twins, name):
    """Skip a test if its extension is missing or does not fit this webui."""
    if not any(folder.startswith(name) for folder in os.listdir(os.environ["WEBUI_EXTENSIONS_DIR"])):
        pytest.skip(f"no {name}* in WEBUI_EXTENSIONS_DIR")
    if twins.webui.kind != "a1111" and name != "ultimate-upscale":
        pytest.skip(f"{twins.webui.kind} has its own in place of {name}")


def test_controlnets_reference_mode_and_what_it_leaves_behind(neighbours):
    beside(neighbours, "sd-webui-controlnet")
    unit = {"enabled": True, "module": "reference_adain+attn", "model": "None", "image": PICTURE, "weight": 1.0,
            "threshold_a": 0.5, "processor_res": 512}  # fmt: skip
    job = {"alwayson_scripts": {"controlnet": {"args": [unit]}}}
    assert neighbours.without.draw_once(**job).pixels != neighbours.without.draw_once().pixels
    assert "% less work" in neighbours.law(HALF, **job)
    assert SAVED in neighbours.law(HALF)


def test_adetailers_inner_jobs_merge_only_if_its_settings_name_us(neighbours):
    beside(neighbours, "adetailer")
    unit = {"ad_model": "mediapipe_face_short", "ad_inpaint_only_masked": True, "ad_inpaint_only_masked_padding": 8}
    job = {"alwayson_scripts": {"ADetailer": {"args": [True, False, unit]}}, "n_iter": 2}
    assert neighbours.without.draw_once(**job).pixels != neighbours.without.draw_once(n_iter=2).pixels
    for more, inner in (({}, 0), ({"override_settings": {"ad_script_names": "token_merging"}}, 2)):
        start = len(neighbours.webui.log_text())
        assert f"3 steps, {SAVED}" in neighbours.law(HALF, **job, **more)
        lines = neighbours.webui.our_lines(start)
        assert len(lines) == 1 + inner and all(SAVED in line for line in lines)


def test_ultimate_upscales_tiles(neighbours):
    beside(neighbours, "ultimate-upscale")
    # by position: tile 128x128, mask blur, padding; seams; upscaler, redraw mode; twice the picture's size
    values = ["", 128, 128, 8, 16, 64, 0.35, 16, 0, True, 0, False, 4, 0, 2, 256, 256, 2]
    job = {"path": "img2img", "init_images": [PICTURE], "denoising_strength": 0.6,
           "script_name": "ultimate sd upscale", "script_args": values}  # fmt: skip
    for webui in neighbours:  # a process's first picture differs, without us too: it is encoded with unseeded noise
        webui.draw(**job)
    start = len(neighbours.webui.log_text())
    assert SAVED in neighbours.law(HALF, **job)
    assert len(neighbours.webui.our_lines(start)) >= 4
