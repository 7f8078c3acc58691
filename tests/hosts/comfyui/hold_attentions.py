"""In ComfyUI's own Python: each of its attention functions, held against repeated keys.

Run in a checkout with ``--cpu``; no server is needed. Ends with an error where merged keys give anything else; prints
as JSON which way each function took.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import torch

sys.path[:0] = [os.getcwd(), str(Path(__file__).parents[3])]
importlib.import_module("comfy.options").enable_args_parsing()
attention = importlib.import_module("comfy.ldm.modules.attention")
patcher = importlib.import_module("comfy.model_patcher").ModelPatcher
slot = importlib.import_module("comfy_nodes.slot_calls")
way_of = importlib.import_module("ways").way_of  # beside this file: ComfyUI has a package `tests` of its own

FUNCTIONS = ("basic", "sub_quad", "split", "pytorch", "flash")  # flash leaves it to torch on a CPU
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def main() -> None:
    """All of them, in every precision, and those that cut their work if memory is short."""
    ways = {}
    for name in FUNCTIONS:
        function, options = getattr(attention, f"attention_{name}"), {}
        # what ComfyUI's own node for choosing a function puts into the slot
        patcher.set_model_optimized_attention(
            SimpleNamespace(model_options={"transformer_options": options}), function)  # fmt: skip
        chosen = slot.OtherNodesCall(options[slot.SLOT], attention.attention_pytorch)
        for dtype in DTYPES:
            ways[f"{name} {dtype}"] = way_of(function, dtype)
            ways[f"{name} {dtype} raised"] = way_of(function, dtype, attn_precision=torch.float32)
            ways[f"{name} {dtype} chosen by a node"] = way_of(chosen, dtype)
    passing = slot.OtherNodesCall(lambda function, *args, **more: function(*args, **more), attention.attention_pytorch)
    ways["pytorch behind a node"] = way_of(passing)
    for name, size in (("split", 10_000), ("sub_quad", 5_000)):
        free = [size, (size, size)]
        attention.model_management.get_free_memory = lambda dev=None, torch_free_too=False, of=free: of[torch_free_too]
        ways[f"{name} short of memory"] = way_of(getattr(attention, f"attention_{name}"))
    print(json.dumps(ways))


if __name__ == "__main__":
    main()
