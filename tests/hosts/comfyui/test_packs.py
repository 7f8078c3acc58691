"""Beside other people's node packs in a real ComfyUI, each where it lies in the checkout's `custom_nodes`."""

from __future__ import annotations

import contextlib
import re

import pytest

from tests.hosts.comfyui.graphs import Graph, assert_merged_and_off, bytes_of, reports_of
from tests.hosts.comfyui.running import make_base, run_script, serve

LEFT_OUT = "of attention left out"


def spelled(name: str) -> str:
    return re.sub("[-_]", "", name).lower()  # people and managers write folders in many ways


@pytest.fixture(scope="module")
def beside(checkout, base, tmp_path_factory):
    """Name of a pack -> a server with it. One for each, because packs change ComfyUI itself."""
    running = {}

    def server(name):
        if name not in running:
            place = checkout / "custom_nodes"
            packs = [folder for folder in place.iterdir() if spelled(folder.name) == spelled(name)]
            if not packs:
                pytest.skip(f"looked for the pack {name} in {place}")
            folder = tmp_path_factory.mktemp("pack")
            make_base(checkout, folder, base / "models", {name: packs[0]})
            running[name] = servers.enter_context(serve(checkout, folder))
        return running[name]

    with contextlib.ExitStack() as servers:
        yield server


@pytest.mark.parametrize(("method", "size", "batch"), [
    ("MultiDiffusion", (160, 128), 1), ("Mixture of Diffusers", (168, 136), 2), ("SpotDiffusion", (224, 96), 1),
])  # fmt: skip
def test_tiled_diffusion(beside, method, size, batch):
    """Three tiles in the last: a call of two, and a call of one."""
    graph = Graph(size=size, batch=batch, steps=1)
    applied = graph.apply()
    tiles = {"method": method, "tile_width": 96, "tile_height": 96, "tile_overlap": 32, "tile_batch_size": 2}
    seen = assert_merged_and_off(beside("ComfyUI-TiledDiffusion"), graph, applied, LEFT_OUT,
                                 behind=lambda model: graph.add("TiledDiffusion", model=model, **tiles))  # fmt: skip
    assert any("144 tokens -> 72, " in report for report in reports_of(seen, applied))


@pytest.mark.parametrize(("uniform", "together", "tokens"), [(True, 2, {"196 "}), (False, 1, {"196 ", "182 ", "77 "})])
def test_ultimate_sd_upscale(beside, uniform, together, tokens):
    """together: tiles in a call. Without uniform tiles there are many sizes, and seams have sizes of their own."""
    graph = Graph()
    applied = graph.apply()
    picture = graph.add("TestPicture", width=160 if uniform else 168, height=128 if uniform else 136)
    values = {
        "upscaled_image": picture, "positive": graph.positive, "negative": graph.negative, "vae": graph.add("TestVAE"),
        "seed": graph.seed, "steps": 2, "cfg": 7.0, "sampler_name": "euler", "scheduler": "normal", "denoise": 0.5,
        "mode_type": "Linear", "tile_width": 96, "tile_height": 96, "mask_blur": 8, "tile_padding": 16,
        "seam_fix_mode": "None" if uniform else "Half Tile + Intersections", "seam_fix_denoise": 1.0,
        "seam_fix_width": 64, "seam_fix_mask_blur": 8, "seam_fix_padding": 16, "force_uniform_tiles": uniform,
        "tiled_decode": False, "batch_size": together,
    }  # fmt: skip
    for name, model in (("plain", graph.model), ("applied", applied), ("removed", graph.removed(applied))):
        image = graph.add("UltimateSDUpscaleNoUpscale", model=model, **values)
        graph.add("TestKeepImage", image=image, name=name)
    seen = beside("ComfyUI_UltimateSDUpscale").good(graph.graph)
    assert bytes_of(seen, "plain") == bytes_of(seen, "removed") != bytes_of(seen, "applied")
    reports = reports_of(seen, applied)
    assert reports and all(LEFT_OUT in report for report in reports)
    assert all(f": {number}tokens" in "\n".join(reports) for number in tokens)


def test_ipadapter_with_a_mask(beside):
    graph = Graph(size=(136, 88), batch=3, steps=1)
    random = graph.add("TestIPAdapter")
    values = {
        "ipadapter": random, "pos_embed": [random[0], 1], "neg_embed": [random[0], 2], "weight": 1.0,
        "weight_type": "linear", "start_at": 0.0, "end_at": 1.0, "embeds_scaling": "V only",
        "attn_mask": graph.add("SolidMask", value=0.5, width=64, height=64),
    }  # fmt: skip
    assert_merged_and_off(beside("ComfyUI_IPAdapter_plus"), graph, graph.apply(), LEFT_OUT,
                          behind=lambda model: graph.add("IPAdapterEmbeds", model=model, **values))  # fmt: skip


def test_animatediff_animates_and_the_pictures_tokens_merge(beside, checkout, base):
    comfy = beside("ComfyUI-AnimateDiff-Evolved")
    run_script(checkout, "make_motion.py", base / "models")
    graph = Graph("sd1_wide", size=(128, 128), batch=3, steps=1)
    motion = graph.add("ADE_LoadAnimateDiffModel", model_name="motion.safetensors")
    motions = graph.add("ADE_ApplyAnimateDiffModelSimple", motion_model=motion)

    def animated(model: list) -> list:
        return graph.add("ADE_UseEvolvedSampling", model=model, beta_schedule="autoselect", m_models=motions)

    graph.sample("still")
    seen = assert_merged_and_off(comfy, graph, graph.apply(), "256 tokens -> 128", behind=animated)
    assert bytes_of(seen, "plain") != bytes_of(seen, "still"), "nothing was animated"
