"""Our nodes with ComfyUI's other nodes and popular packs, in a real ComfyUI: they merge, or say why not."""

import pytest

from tests.hosts.comfyui.graphs import SEEDS, Graph, bytes_of, report_of
from tests.hosts.comfyui.running import make_base, run_script, serve

OTHERS = {  # a node -> its inputs, and the report's words in both orders
    "HyperTile": ({"tile_size": 64, "swap_size": 1, "max_depth": 0, "scale_depth": False},
                  "another node's patch changed the tokens (nodes_hypertile.HyperTile.execute)"),
    "TomePatchModel": ({"ratio": 0.3}, "another node's patch changed the tokens (nodes_tomesd.TomePatchModel.execute)"),
    "PatchModelAddDownscale": (
        {"block_number": 1, "downscale_factor": 2.0, "start_percent": 0.0, "end_percent": 1.0,
         "downscale_after_skip": True, "downscale_method": "bicubic", "upscale_method": "bicubic"}, "tokens in "),
    "PerturbedAttentionGuidance": ({"scale": 3.0}, "another program runs in its place: nodes_pag.Perturbed"),
    "SelfAttentionGuidance": ({"scale": 0.5, "blur_sigma": 2.0}, "another program runs in its place: nodes_sag."),
    # EasyCache leaves out all steps that it may
    "EasyCache": ({"reuse_threshold": 3.0, "start_percent": 0.0, "end_percent": 0.9, "verbose": False},
                  "of them computed, "),
}  # fmt: skip


@pytest.mark.parametrize("kind", OTHERS)
def test_before_or_after_makes_no_difference(comfy, kind):
    inputs, said = OTHERS[kind]
    # some nodes need the finest level alone; EasyCache needs steps to leave out
    graph, settings = Graph("flux", steps=5) if kind == "EasyCache" else Graph(steps=1), {"level": "up to /2"}
    alone = graph.add(kind, model=graph.model, **inputs)
    before, inner = graph.apply(alone, **settings), graph.apply(**settings)
    after = graph.add(kind, model=inner, **inputs)
    graph.sample_all({"plain": graph.model, "other alone": alone, "before": before, "after": after,
                      "removed": graph.removed(after)})  # fmt: skip
    seen = comfy.good(graph.graph)
    assert bytes_of(seen, "plain") != bytes_of(seen, "other alone") == bytes_of(seen, "removed")
    assert bytes_of(seen, "before") == bytes_of(seen, "after") != bytes_of(seen, "other alone")
    assert said in report_of(seen, before) and said in report_of(seen, inner)


def test_a_picture_that_deep_shrink_makes_too_small_to_gain_is_told_with_its_name(comfy):
    graph = Graph(steps=1)
    graph.latent = graph.add("EmptyLatentImage", width=512, height=512, batch_size=1)
    inputs, _ = OTHERS["PatchModelAddDownscale"]
    applied = graph.strength(graph.add("PatchModelAddDownscale", model=graph.model, **inputs), strength=1.0)
    graph.sample("applied", applied)
    report = report_of(comfy.good(graph.graph), applied)
    assert "% less work" in report
    assert "another node made the picture smaller (nodes_model_downscale.PatchModelAddDownscale.execute)" in report


def test_in_ultimate_sd_upscale_it_merges_tiles_and_seams_of_every_size_and_is_off_again(checkout, base, tmp_path):
    """The test has its own server, because packs change ComfyUI."""
    pack = checkout / "custom_nodes" / "ComfyUI_UltimateSDUpscale"
    if not pack.is_dir():
        pytest.skip(f"needs the pack {pack}")
    run_script(checkout, "make_models.py", "checkpoint", base / "models")
    graph = Graph()
    loaded = graph.add("CheckpointLoaderSimple", ckpt_name="v1-5-pruned-emaonly-fp16.safetensors")
    picture, applied = graph.add("EmptyImage", width=168, height=136, batch_size=1, color=0x806040), graph.apply()
    for name, model in {"plain": graph.model, "applied": applied, "removed": graph.removed(applied)}.items():
        image = graph.add("UltimateSDUpscaleNoUpscale", model=model, upscaled_image=picture, positive=graph.positive,
                          negative=graph.negative, vae=[loaded[0], 2], seed=graph.seed, steps=2, cfg=7.0,
                          sampler_name="euler", scheduler="normal", denoise=0.5, mode_type="Linear", tile_width=96,
                          tile_height=96, mask_blur=8, tile_padding=16, seam_fix_mode="Half Tile + Intersections",
                          seam_fix_denoise=1.0, seam_fix_width=64, seam_fix_mask_blur=8, seam_fix_padding=16,
                          force_uniform_tiles=False, tiled_decode=False, batch_size=1)  # fmt: skip
        graph.add("TestKeep", result=image, name=name)
    make_base(checkout, tmp_path, base / "models")
    (tmp_path / "custom_nodes" / pack.name).symlink_to(pack.resolve(), target_is_directory=True)
    with serve(checkout, tmp_path) as comfy:
        seen = comfy.good(graph.graph)
    assert bytes_of(seen, "plain") == bytes_of(seen, "removed") != bytes_of(seen, "applied")
    reports = [text for number, text in seen["texts"] if number == applied[0] and "merges in samplers" not in text]
    assert all("% less work" in report for report in reports)
    assert all(said in "\n".join(reports) for said in (": 196 tokens", ": 182 tokens", ": 77 tokens")), reports


@pytest.mark.parametrize("sampled", [0, 1])
def test_a_node_whose_model_no_sampler_used_says_so_at_the_end_of_the_prompt(comfy, sampled):
    """A merge of two models has the patches of the first alone."""
    graph = Graph(steps=1)
    applied = [graph.apply(merge_seed=next(SEEDS)) for _ in range(2)]
    graph.sample("merged", graph.add("ModelMergeSimple", model1=applied[0], model2=applied[1], ratio=0.5))
    if sampled:
        graph.sample("second", applied[1])
    seen = comfy.good(graph.graph)
    first, second = (report_of(seen, node) for node in applied)
    assert "% less work" in first
    assert ("% less work" if sampled else "no sampler used this model") in second
