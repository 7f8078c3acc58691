"""In ComfyUI's own Python: its attention with each of its functions, held against repeated keys.

Run in a checkout with ``--cpu``; no server is needed. Ends with an error where merged keys give anything else; prints
as JSON which ways each function took.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))
sys.path.insert(0, os.getcwd())

import torch

ROOT = Path(__file__).parents[3]


def load_comfyui():
    """ComfyUI's attention, by the command line; then ours, which makes it known."""
    importlib.import_module("comfy.options").enable_args_parsing()
    module = importlib.import_module("comfy.ldm.modules.attention")
    importlib.import_module("comfy_nodes")
    return module


def load_conformance():
    """By its file: ComfyUI has a package `tests` of its own."""
    spec = importlib.util.spec_from_file_location("conformance", ROOT / "tests" / "conformance.py")
    module = sys.modules["conformance"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


comfy_attention, conformance = load_comfyui(), load_conformance()
FUNCTIONS = ("basic", "sub_quad", "split", "pytorch", "flash", "xformers")  # flash: leaves it to torch on a CPU


def ways(dtype=torch.float32, precision=None, batches=(1, 2, 5, 6), **options):
    """Those that the function in force took."""
    channels, heads = conformance.CHANNELS, conformance.HEADS
    facts = {"heads": heads, "dim_head": channels // heads, "attn_precision": precision, "dtype": dtype}
    module = conformance.telling(comfy_attention.CrossAttention(channels, **facts, operations=torch.nn), dtype)
    return sorted(conformance.ways(module, dtype, batches, transformer_options=options))


def use(name):
    """From now on ComfyUI attends with this function."""
    function = getattr(comfy_attention, f"attention_{name}")
    comfy_attention.optimized_attention = comfy_attention.optimized_attention_masked = function


def short_of_memory(size):
    """From now on memory is said to be as short as this."""

    def get_free_memory(dev=None, torch_free_too=False):
        return (size, size) if torch_free_too else size

    comfy_attention.model_management.get_free_memory = get_free_memory


def main():
    """All of them, in every precision, and those that cut their work where memory is short."""
    conformance.with_xformers(conformance.LASTING, comfy_attention)
    found = {}
    for name in FUNCTIONS:
        use(name)
        for dtype in conformance.DTYPES[::2] + conformance.DTYPES[3:]:
            found[f"{name} {dtype}"] = ways(dtype)
            found[f"{name} {dtype} raised"] = ways(dtype, torch.float32)
    use("pytorch")
    found["override"] = ways(optimized_attention_override=lambda function, *args, **kwargs: function(*args, **kwargs))
    comfy_attention.optimized_attention_masked = comfy_attention.attention_basic
    found["another function for masks"] = ways()
    for name, size in (("split", 10_000), ("sub_quad", 5_000)):
        use(name)
        short_of_memory(size)
        found[f"{name} short of memory"] = ways(batches=(2,))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
