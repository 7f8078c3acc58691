"""Other people's node packs, each in the checkout's `custom_nodes` and on a server of its own: packs change ComfyUI."""

from __future__ import annotations

import pytest

from tests.hosts.comfyui.graphs import Graph, bytes_of
from tests.hosts.comfyui.running import make_base, run_script, serve


def tiled(graph: Graph, name: str, model: list) -> None:
    """Three tiles: a call of two, and a call of one."""
    tiles = {"method": "SpotDiffusion", "tile_width": 96, "tile_height": 96, "tile_overlap": 32, "tile_batch_size": 2}
    graph.sample(name, graph.add("TiledDiffusion", model=model, **tiles))


def upscaled(graph: Graph, name: str, model: list) -> None:
    """Tiles of many sizes; seams have sizes of their own."""
    loaded = graph.add("CheckpointLoaderSimple", ckpt_name="v1-5-pruned-emaonly-fp16.safetensors")
    picture = graph.add("EmptyImage", width=168, height=136, batch_size=1, color=0x806040)
    image = graph.add(
        "UltimateSDUpscaleNoUpscale", model=model, upscaled_image=picture, positive=graph.positive,
        negative=graph.negative, vae=[loaded[0], 2], seed=graph.seed, steps=2, cfg=7.0, sampler_name="euler",
        scheduler="normal", denoise=0.5, mode_type="Linear", tile_width=96, tile_height=96, mask_blur=8,
        tile_padding=16, seam_fix_mode="Half Tile + Intersections", seam_fix_denoise=1.0, seam_fix_width=64,
        seam_fix_mask_blur=8, seam_fix_padding=16, force_uniform_tiles=False, tiled_decode=False, batch_size=1,
    )  # fmt: skip
    graph.add("TestKeep", result=image, name=name)


def animated(graph: Graph, name: str, model: list) -> None:
    motion = graph.add("ADE_LoadAnimateDiffModel", model_name="motion.safetensors")
    motions = graph.add("ADE_ApplyAnimateDiffModelSimple", motion_model=motion)
    graph.sample(name, graph.add("ADE_UseEvolvedSampling", model=model, beta_schedule="autoselect", m_models=motions))


PACKS = {  # a pack -> its models, the graph, how it draws there, and what the reports say
    "ComfyUI-TiledDiffusion": ((), {"size": (224, 96), "steps": 1}, tiled, ["144 tokens -> 72, "]),
    "ComfyUI_UltimateSDUpscale": (["checkpoint"], {}, upscaled, [": 196 tokens", ": 182 tokens", ": 77 tokens"]),
    "ComfyUI-AnimateDiff-Evolved": (
        ["motion"], {"model": "sd1_wide", "batch": 3, "steps": 1}, animated, ["256 tokens -> 128"]),
}  # fmt: skip


@pytest.mark.parametrize("pack", PACKS)
def test_beside_a_pack_it_merges_and_is_off_again(checkout, base, tmp_path, pack):
    place, (models, values, draw, said) = checkout / "custom_nodes" / pack, PACKS[pack]
    if not place.is_dir():
        pytest.skip(f"needs the pack {place}")
    for kind in models:
        run_script(checkout, "make_models.py", kind, base / "models")
    graph = Graph(**values)
    graph.sample("without the pack")
    applied = graph.apply()
    for name, model in {"plain": graph.model, "applied": applied, "removed": graph.removed(applied)}.items():
        draw(graph, name, model)
    make_base(checkout, tmp_path, base / "models")
    (tmp_path / "custom_nodes" / pack).symlink_to(place.resolve(), target_is_directory=True)
    with serve(checkout, tmp_path) as comfy:
        seen = comfy.good(graph.graph)
    assert bytes_of(seen, "plain") == bytes_of(seen, "removed") != bytes_of(seen, "applied")
    assert bytes_of(seen, "plain") != bytes_of(seen, "without the pack")
    reports = [text for number, text in seen["texts"] if number == applied[0] and "waits for a sampler" not in text]
    assert all("of attention left out" in report for report in reports)
    assert all(one in "\n".join(reports) for one in said), reports
