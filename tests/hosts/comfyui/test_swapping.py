"""Weights that are not where the model runs: blocks swapped out, models loaded in part, and weights in eight bits.

Other people's swappers need a checkout, which COMFYUI_KREA2BLOCKSWAP (olob0's), COMFYUI_UNIBLOCKSWAP (smthemex's) and
COMFYUI_WANVIDEOWRAPPER (kijai's) name. NativeBlockSwap is in `test_loaders.py`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hosts.comfyui.graphs import Graph, bytes_of, of_transformer, report_of
from tests.hosts.comfyui.running import make_base_beside, make_transformers, serve

PACKS = {
    "COMFYUI_KREA2BLOCKSWAP": "ComfyUI-Krea2BlockSwap", "COMFYUI_UNIBLOCKSWAP": "ComfyUI_UniBlockSwap",
    "COMFYUI_WANVIDEOWRAPPER": "ComfyUI-WanVideoWrapper",
}  # fmt: skip
MERGED = {"flux": "1101 tokens -> ", "sd3": "1101 tokens -> ", "wan": "1024 tokens -> ", "krea2": "1101 tokens -> "}
BLOCKS = {"flux": 4, "sd3": 4, "wan": 3, "krea2": 2}


@pytest.fixture(scope="module")
def host(checkout, base, tmp_path_factory) -> Iterator:
    """A server with tiny transformers and the swappers that are there."""
    make_transformers(checkout, base)
    folder = tmp_path_factory.mktemp("swapping")
    packs = [Path(os.environ[name]).resolve() for name in PACKS if name in os.environ]
    make_base_beside(checkout, base, folder, {pack.name: pack for pack in packs})
    with serve(checkout, folder) as running:
        yield running


def needs(name: str) -> pytest.MarkDecorator:
    """The checkout of a pack, which the server has."""
    return pytest.mark.skipif(name not in os.environ, reason=f"needs a checkout of {PACKS[name]}: set {name}")


def swapping_changes_nothing(host, graph: Graph, told: str, node: str, **values) -> dict:
    """Beside a swapper, in both orders, what merges is what merges without it, and off again it is not there.

    told: of the reports. node, values: the swapper's. Gives what was seen.
    """

    def swap(model: list) -> list:
        return graph.add(node, model=model, **values)

    swapped, merged = swap(graph.model), graph.strength(strength=0.5)
    orders = {"swapper first": graph.strength(swapped, strength=0.5), "merging first": swap(merged)}
    samples = {
        "plain": graph.model, "swapped": swapped, "merged": merged, **orders,
        "off": graph.strength(swapped, strength=0.0),
        **{f"{name}, removed": graph.removed(model) for name, model in orders.items()},
    }  # fmt: skip
    graph.sample_all(samples, cfg=1.0)
    seen = host.good(graph.graph)
    plain, both = bytes_of(seen, "plain"), bytes_of(seen, "merged")
    assert plain != both and plain == bytes_of(seen, "swapped") == bytes_of(seen, "off")
    assert all(both == bytes_of(seen, name) for name in orders)
    assert all(plain == bytes_of(seen, f"{name}, removed") for name in orders)
    for applied in (merged, orders["swapper first"]):
        report = report_of(seen, applied)
        print(report)
        assert told in report and "of attention left out" in report and "stepped aside" not in report
    return seen


@pytest.mark.parametrize(("kind", "dtype"), [
    ("flux", "default"), ("sd3", "default"), ("wan", "default"), ("flux", "fp8_e4m3fn"),
])  # fmt: skip
def test_blocks_that_are_elsewhere_while_they_do_not_run(host, kind, dtype):
    graph = of_transformer(kind, dtype)
    seen = swapping_changes_nothing(host, graph, MERGED[kind], "TestSwap", of="blocks")
    assert len(seen["swaps"]) == 6
    assert all(one == [BLOCKS[kind], BLOCKS[kind] * graph.steps, BLOCKS[kind]] for one in seen["swaps"]), seen["swaps"]


@pytest.mark.parametrize("kind", ["flux", "sd3", "wan"])
def test_models_loaded_in_part_with_a_lora(host, kind):
    """The LoRA is then added where a weight is used, and is in no weight."""
    graph = of_transformer(kind)
    graph.model = graph.add("TestLora", model=graph.model, strength=1.0)
    seen = swapping_changes_nothing(host, graph, MERGED[kind], "TestInPart", share=0.9)
    assert len(seen["swaps"]) == 6 and all(freed > 0.5 and waiting for freed, waiting in seen["swaps"]), seen["swaps"]


@pytest.mark.parametrize("dtype", ["fp8_e4m3fn", "fp8_e5m2"])
@pytest.mark.parametrize("kind", ["flux", "sd3", "wan"])
def test_weights_in_eight_bits(host, kind, dtype):
    graph = of_transformer(kind, dtype)
    whole = graph.add("UNETLoader", unet_name=f"{kind}.safetensors", weight_dtype="default")
    lora = graph.add("TestLora", model=graph.model, strength=1.0)
    applied = {"merged": graph.strength(strength=0.5), "merged with a LoRA": graph.strength(lora, strength=0.5)}
    graph.sample_all({
        "whole": whole, "plain": graph.model, "off": graph.strength(strength=0.0), "with a LoRA": lora, **applied,
        **{f"{name}, removed": graph.removed(model) for name, model in applied.items()},
    }, cfg=1.0)  # fmt: skip
    seen = host.good(graph.graph)
    assert len({str(bytes_of(seen, name)) for name in ("whole", "plain", "with a LoRA", *applied)}) == 5
    assert bytes_of(seen, "plain") == bytes_of(seen, "off") == bytes_of(seen, "merged, removed")
    assert bytes_of(seen, "with a LoRA") == bytes_of(seen, "merged with a LoRA, removed")
    for model in applied.values():
        report = report_of(seen, model)
        print(report)
        assert MERGED[kind] in report and "of attention left out" in report


@needs("COMFYUI_KREA2BLOCKSWAP")
@pytest.mark.parametrize("kind", ["krea2", "wan"])
def test_beside_krea2_block_swap(host, kind):
    """Its hooks are on the blocks while the model runs. Here they move weights to where these are already."""
    swapping_changes_nothing(host, of_transformer(kind), MERGED[kind], "Krea2BlockSwap", blocks_to_swap=2)
    assert f"swapping 2/{BLOCKS[kind]} blocks" in host.log.read_text()


@needs("COMFYUI_UNIBLOCKSWAP")
@pytest.mark.parametrize("kind", ["flux", "wan"])
def test_beside_uni_block_swap(host, kind):
    """It puts a list of its own in the place of the model's blocks, in every branch."""
    swapping_changes_nothing(host, of_transformer(kind), MERGED[kind], "UniBlockSwap", num_blocks=1)
    assert "preload prefix [0,1)" in host.log.read_text()


@needs("COMFYUI_WANVIDEOWRAPPER")
def test_a_model_of_wan_video_wrapper_cannot_be_connected(host):
    """It swaps blocks of a model that is no MODEL, and ComfyUI says so before anything runs."""
    graph = of_transformer("wan")
    loaded = graph.add("WanVideoModelLoader", model="wan.safetensors", base_precision="fp32", quantization="disabled",
                       load_device="main_device")  # fmt: skip
    graph.add("TestSink", model=graph.strength(loaded))
    with pytest.raises(AssertionError, match=r"received_type\(WANVIDEOMODEL\) mismatch input_type\(MODEL\)"):
        host.queue(graph.graph)


def test_a_unet_whose_layers_are_elsewhere_merges_as_any_other(host):
    """As on a card, where ComfyUI leaves weights in main memory and brings each to its layer's call."""
    graph = Graph(size=(256, 256))
    swapped = graph.add("TestSwap", model=graph.model, of="layers")
    applied = graph.strength(swapped, strength=0.8)
    graph.sample("merged", applied)
    graph.sample_all({"plain": graph.model, "swapped": swapped, "never swapped": graph.strength(strength=0.8)})
    seen = host.good(graph.graph)
    assert bytes_of(seen, "plain") == bytes_of(seen, "swapped")
    assert bytes_of(seen, "merged") == bytes_of(seen, "never swapped") != bytes_of(seen, "plain")
