"""In ComfyUI's own Python: each of its attention functions, held against repeated keys.

Run in a checkout with ``--cpu``; no server is needed. Ends with an error where merged keys give anything else; prints
as JSON which way each function took.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch

ROOT = Path(__file__).parents[3]
sys.path[:0] = [os.getcwd(), str(ROOT)]

FUNCTIONS = ("basic", "sub_quad", "split", "pytorch", "flash")  # flash leaves it to torch on a CPU
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def load(name: str) -> ModuleType:
    """One of our modules, by its file: ComfyUI has a package `tests` of its own."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "tests" / f"{name}.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


importlib.import_module("comfy.options").enable_args_parsing()
attention = importlib.import_module("comfy.ldm.modules.attention")
slot, way_of = importlib.import_module("comfy_nodes.slot"), load("comfy_ways").way_of


def main() -> None:
    """All of them, in every precision, and those that cut their work if memory is short."""
    ways = {}
    for name in FUNCTIONS:
        function = getattr(attention, f"attention_{name}")
        chosen = slot.Through(override_of(function), attention.attention_pytorch)
        for dtype in DTYPES:
            ways[f"{name} {dtype}"] = way_of(function, dtype)
            ways[f"{name} {dtype} raised"] = way_of(function, dtype, attn_precision=torch.float32)
            ways[f"{name} {dtype} chosen by a node"] = way_of(chosen, dtype)
    passing = slot.Through(lambda function, *args, **kwargs: function(*args, **kwargs), attention.attention_pytorch)
    ways["pytorch behind a node"] = way_of(passing)
    for name, size in (("split", 10_000), ("sub_quad", 5_000)):
        free = [size, (size, size)]
        attention.model_management.get_free_memory = lambda dev=None, torch_free_too=False, of=free: of[torch_free_too]
        ways[f"{name} short of memory"] = way_of(getattr(attention, f"attention_{name}"))
    print(json.dumps(ways))


def override_of(function):
    """What ComfyUI's own node for choosing a function puts into the slot."""
    patcher = importlib.import_module("comfy.model_patcher").ModelPatcher
    options = SimpleNamespace(model_options={"transformer_options": {}})
    patcher.set_model_optimized_attention(options, function)
    return options.model_options["transformer_options"][slot.SLOT]


if __name__ == "__main__":
    main()
