"""In A1111's own Python: every forward that it puts on an attention, held against repeated keys.

Run in a checkout with the flags for a CPU; no server is needed. Ends with an error if merged keys give anything else;
prints as JSON in which way each forward was told of sizes.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import types
from pathlib import Path

sys.path.insert(0, os.getcwd())

import torch

ROOT = Path(__file__).parents[3]
PACKAGE = "_tome_core_webui"  # as scripts/token_merging.py calls it
importlib.import_module("modules.shared_init").initialize()
importlib.import_module("modules.processing")  # before what it imports, which imports it
shared, optimizations, hypernetwork, *libraries = (importlib.import_module(name) for name in (
    "modules.shared", "modules.sd_hijack_optimizations", "modules.hypernetworks.hypernetwork",
    "ldm.modules.attention", "sgm.modules.attention",
))  # fmt: skip
FORWARDS = (
    "split_cross_attention_forward", "split_cross_attention_forward_v1", "split_cross_attention_forward_invokeAI",
    "sub_quad_attention_forward", "xformers_attention_forward", "scaled_dot_product_attention_forward",
    "scaled_dot_product_no_mem_attention_forward", "attention_CrossAttention_forward",
)  # fmt: skip


def load_ours():
    """The extension's descriptions, and the laws that they are held against, by one engine."""
    parent = sys.modules[PACKAGE] = types.ModuleType(PACKAGE)
    parent.__path__ = [str(ROOT)]
    importlib.import_module(f"{PACKAGE}.extension.attentions").describe()
    ours = {name: module for name, module in sys.modules.items() if name.startswith(f"{PACKAGE}.tome_core")}
    sys.modules.update({name.removeprefix(f"{PACKAGE}."): module for name, module in ours.items()})
    return importlib.import_module(f"{PACKAGE}.tests.conformance")


conformance = load_ours()


def way(kind, dtype):
    """That of the forward in force."""
    channels, heads = conformance.CHANNELS, conformance.HEADS
    module = conformance.telling(kind(channels, heads=heads, dim_head=channels // heads), dtype)
    tolerance = conformance.TOLERANCE[torch.float32 if shared.opts.upcast_attn and dtype.itemsize > 4 else dtype]
    return conformance.way(module, dtype, tolerance=tolerance, mask=None, additional_tokens=None)


def make_hypernetwork():
    """For tokens as wide as ours."""
    network = hypernetwork.Hypernetwork(
        name="ours", enable_sizes=[conformance.CHANNELS], layer_structure=[1, 2, 1], activation_func="relu",
        weight_init="Normal",
    )  # fmt: skip
    network.eval()
    with torch.no_grad():
        for weight in network.weights():
            weight.copy_(torch.randn(weight.shape) * 0.2)
    for layer in (layer for pair in network.layers.values() for layer in pair):
        layer.double()
    return network


def main():
    """All of them on both libraries' attention: in each precision, raised to float32, behind a hypernetwork."""
    torch.manual_seed(0)
    conformance.with_xformers(conformance.LASTING, optimizations)
    network, ways = make_hypernetwork(), {}
    for name in FORWARDS:
        for library in libraries:
            kind = library.CrossAttention
            kind.forward = getattr(optimizations, name, None) or getattr(hypernetwork, name)
            case = f"{name} on {kind.__module__.partition('.')[0]}"
            for raised in (False, True):
                shared.opts.data["upcast_attn"] = raised
                for dtype in conformance.DTYPES:
                    ways[f"{case} {dtype}{' raised' if raised else ''}"] = way(kind, dtype)
            shared.opts.data["upcast_attn"] = False
            shared.loaded_hypernetworks[:] = [network]
            ways[f"{case} hypernetwork"] = way(kind, torch.float64)
            shared.loaded_hypernetworks.clear()
    print(json.dumps(ways))


if __name__ == "__main__":
    main()
