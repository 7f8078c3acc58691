"""Other people's nodes in a real ComfyUI: ComfyUI-GGUF's loader, KJNodes' SageAttention, a swapper of Wan's blocks.

COMFYUI_GGUF, COMFYUI_KJNODES and COMFYUI_BLOCKSWAP (lum3on's NativeBlockSwap) name a checkout of the pack, whose
requirements COMFYUI_PYTHON has.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hosts.comfyui.graphs import Graph, assert_merged_and_off, bytes_of, of_transformer, report_of
from tests.hosts.comfyui.running import HERE, make_base_beside, make_transformers, run_script, serve

PACKS = {
    "COMFYUI_GGUF": "ComfyUI-GGUF", "COMFYUI_KJNODES": "ComfyUI-KJNodes",
    "COMFYUI_BLOCKSWAP": "ComfyUI_NativeBlockSwap",
}  # fmt: skip
MERGED = "1101 tokens -> "  # of a picture of 512 px with its prompt, by the tiny Flux


@pytest.fixture(scope="module")
def beside(request, checkout, base, tmp_path_factory) -> Iterator:
    """A server with the pack that this variable names, and tiny transformers."""
    named = os.environ.get(request.param)
    if not named:
        pytest.skip(f"needs a checkout of {PACKS[request.param]}: set {request.param}")
    models = make_transformers(checkout, base)
    if request.param == "COMFYUI_GGUF":
        run_script(checkout, "make_gguf.py", models)
    folder = tmp_path_factory.mktemp("loader")
    packs = (Path(named).resolve(), HERE / "sage_stand_in")
    make_base_beside(checkout, base, folder, {pack.name: pack for pack in packs})
    with serve(checkout, folder) as running:
        yield running


@pytest.mark.parametrize("beside", ["COMFYUI_GGUF"], indirect=True)
def test_a_gguf_transformer_merges_and_off_again_is_the_same_bytes(beside):
    graph = of_transformer("flux")
    half, graph.model = graph.model, graph.add("UnetLoaderGGUF", unet_name="flux.gguf")
    applied = graph.strength(strength=0.5)
    graph.sample_all({"half": half, "off": graph.strength(strength=0.0)}, cfg=1.0)
    seen = assert_merged_and_off(beside, graph, applied, MERGED, cfg=1.0)
    assert bytes_of(seen, "plain") == bytes_of(seen, "off")
    assert bytes_of(seen, "plain") != bytes_of(seen, "half"), "else this would be a test of plain weights"


def sage(graph: Graph, model: list) -> list:
    return graph.add("PathchSageAttentionKJ", model=model, sage_attention="auto", allow_compile=False)


@pytest.mark.parametrize("kind", ["UNet", "transformer"])
@pytest.mark.parametrize("beside", ["COMFYUI_KJNODES"], indirect=True)
def test_sage_attention_and_merging_are_the_same_in_both_orders(beside, kind):
    graph, cfg = (Graph(size=(256, 256)), 7.0) if kind == "UNet" else (of_transformer("flux"), 1.0)
    half = {"strength": 0.5, "end": 0.5}  # a step that merges, and one that is the node's alone
    merged, sage_first = graph.strength(**half), graph.strength(sage(graph, graph.model), **half)
    graph.sample_all({"own": graph.model, "merged alone": merged, "sage first": sage_first}, cfg=cfg)
    seen = assert_merged_and_off(beside, graph, merged, behind=lambda model: sage(graph, model), cfg=cfg)
    assert bytes_of(seen, "applied") == bytes_of(seen, "sage first") != bytes_of(seen, "merged alone")
    assert bytes_of(seen, "own") != bytes_of(seen, "plain")
    for applied in (merged, sage_first):
        report = report_of(seen, applied)
        print(report)
        assert "of attention left out" in report and (kind == "UNet" or MERGED in report)


@pytest.mark.parametrize("beside", ["COMFYUI_BLOCKSWAP"], indirect=True)
def test_blocks_that_are_swapped_out_merge_and_off_again_are_the_same_bytes(beside):
    """The pack moves blocks between main memory and a card. Here the first is all there is, so its node swaps out all
    of them: what is seen is that its hook runs and merging neither holds a block nor misses one."""
    graph = of_transformer("wan")

    def swapped(model: list) -> list:
        return graph.add("nativeWanVideoBlockSwap", model=model, blocks_to_swap=40, offload_img_emb=False,
                         offload_txt_emb=True, use_non_blocking=False)

    swap_first = graph.strength(swapped(graph.model), strength=0.5)
    graph.sample("swap first", swap_first, cfg=1.0)
    alone = beside.good(graph.graph)  # because the pack swaps where weights are loaded, which is once
    assert "Initializing block swap" in beside.log.read_text()
    merged = graph.strength(strength=0.5)
    graph.sample_all({"own": graph.model, "merged": merged, "off": graph.removed(swap_first)}, cfg=1.0)
    seen = assert_merged_and_off(beside, graph, merged, behind=swapped, cfg=1.0)
    assert bytes_of(seen, "own") == bytes_of(seen, "plain") == bytes_of(seen, "off")
    assert bytes_of(seen, "applied") == bytes_of(seen, "merged") == bytes_of(alone, "swap first")
    assert "1024 tokens -> " in report_of(alone, swap_first)
