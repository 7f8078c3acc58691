"""Beside other people's node packs in a real ComfyUI, each in the checkout's `custom_nodes`.

Each pack has a server of its own, because packs change ComfyUI itself.
"""

from __future__ import annotations

import pytest

from tests.hosts.comfyui.graphs import Graph, assert_merged_and_off, bytes_of, reports_of
from tests.hosts.comfyui.running import make_base, run_script, serve

LEFT_OUT = "of attention left out"


@pytest.fixture
def beside(request, checkout, base, tmp_path):
    """A server with the pack that the test names."""
    place = checkout / "custom_nodes" / request.param
    if not place.is_dir():
        pytest.skip(f"needs the pack {place}")
    make_base(checkout, tmp_path, base / "models", {request.param: place})
    with serve(checkout, tmp_path) as comfy:
        yield comfy


def with_pack(name: str):
    return pytest.mark.parametrize("beside", [name], indirect=True)


@with_pack("ComfyUI-TiledDiffusion")
def test_tiled_diffusion(beside):
    """Three tiles: a call of two, and a call of one."""
    graph = Graph(size=(224, 96), steps=1)
    applied = graph.apply()
    tiles = {"method": "SpotDiffusion", "tile_width": 96, "tile_height": 96, "tile_overlap": 32, "tile_batch_size": 2}
    seen = assert_merged_and_off(beside, graph, applied, LEFT_OUT,
                                 behind=lambda model: graph.add("TiledDiffusion", model=model, **tiles))  # fmt: skip
    assert any("144 tokens -> 72, " in report for report in reports_of(seen, applied))


@with_pack("ComfyUI_UltimateSDUpscale")
def test_ultimate_sd_upscale(beside):
    """Tiles of many sizes; seams have sizes of their own."""
    graph = Graph()
    applied = graph.apply()
    picture = graph.add("EmptyImage", width=168, height=136, batch_size=2, color=0x808080)
    values = {
        "upscaled_image": picture, "positive": graph.positive, "negative": graph.negative, "vae": graph.add("TestVAE"),
        "seed": graph.seed, "steps": 2, "cfg": 7.0, "sampler_name": "euler", "scheduler": "normal", "denoise": 0.5,
        "mode_type": "Linear", "tile_width": 96, "tile_height": 96, "mask_blur": 8, "tile_padding": 16,
        "seam_fix_mode": "Half Tile + Intersections", "seam_fix_denoise": 1.0, "seam_fix_width": 64,
        "seam_fix_mask_blur": 8, "seam_fix_padding": 16, "force_uniform_tiles": False, "tiled_decode": False,
        "batch_size": 1,
    }  # fmt: skip
    for name, model in (("plain", graph.model), ("applied", applied), ("removed", graph.removed(applied))):
        image = graph.add("UltimateSDUpscaleNoUpscale", model=model, **values)
        graph.add("TestKeep", result=image, name=name)
    seen = beside.good(graph.graph)
    assert bytes_of(seen, "plain") == bytes_of(seen, "removed") != bytes_of(seen, "applied")
    reports = reports_of(seen, applied)
    assert reports and all(LEFT_OUT in report for report in reports)
    assert all(f": {number} tokens" in "\n".join(reports) for number in (196, 182, 77))


@with_pack("ComfyUI-AnimateDiff-Evolved")
def test_animatediff_animates_and_the_pictures_tokens_merge(beside, checkout, base):
    run_script(checkout, "make_models.py", "motion", base / "models")
    graph = Graph("sd1_wide", size=(128, 128), batch=3, steps=1)
    motion = graph.add("ADE_LoadAnimateDiffModel", model_name="motion.safetensors")
    motions = graph.add("ADE_ApplyAnimateDiffModelSimple", motion_model=motion)

    def animated(model: list) -> list:
        return graph.add("ADE_UseEvolvedSampling", model=model, beta_schedule="autoselect", m_models=motions)

    graph.sample("still")
    seen = assert_merged_and_off(beside, graph, graph.apply(), "256 tokens -> 128", behind=animated)
    assert bytes_of(seen, "plain") != bytes_of(seen, "still"), "nothing was animated"
