"""ComfyUI's own nodes that merging is put beside, by the class and the inputs that a graph names.

Nothing here knows of merging, and nothing of ComfyUI is imported before a node is asked for.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from typing import Any, NamedTuple


class Node(NamedTuple):
    """A node from a model to a model. module: of `comfy_extras`, where its class is."""

    name: str
    meaning: str
    module: str
    kind: str
    inputs: Mapping[str, Any]

    @property
    def is_there(self) -> bool:
        """Does the environment name a checkout?"""
        return bool(os.environ.get("COMFYUI_DIR"))

    def put_on(self, model: Any, **inputs: Any) -> Any:
        """The model with the node's patches, some inputs others than its own; in ComfyUI's Python."""
        module = importlib.import_module(f"comfy_extras.{self.module}")
        return getattr(module, self.kind).execute(model, **{**self.inputs, **inputs})[0]


_EASY = {"reuse_threshold": 0.2, "start_percent": 0.15, "end_percent": 0.95, "verbose": False}  # as the nodes start
_FREE_U = {"b1": 1.3, "b2": 1.4, "s1": 0.9, "s2": 0.2}
_TILES = {"tile_size": 256, "swap_size": 2, "max_depth": 0, "scale_depth": False}
_SHRINK = {"block_number": 3, "downscale_factor": 2.0, "start_percent": 0.0, "end_percent": 0.35,
           "downscale_after_skip": True, "downscale_method": "bicubic", "upscale_method": "bicubic"}  # fmt: skip
NODES = {one.name: one for one in (
    Node("EasyCache", "ComfyUI's, as its node starts", "nodes_easycache", "EasyCacheNode", _EASY),
    Node("LazyCache", "ComfyUI's, as its node starts", "nodes_easycache", "LazyCacheNode", _EASY),
    Node("HyperTile node", "ComfyUI's, as its node starts", "nodes_hypertile", "HyperTile", _TILES),
    Node("Deep Shrink", "ComfyUI's PatchModelAddDownscale, as its node starts", "nodes_model_downscale",
         "PatchModelAddDownscale", _SHRINK),
    Node("FreeU_V2 node", "ComfyUI's, as its node starts", "nodes_freelunch", "FreeU_V2", _FREE_U),
    Node("PAG node", "ComfyUI's PerturbedAttentionGuidance at scale 1", "nodes_pag", "PerturbedAttentionGuidance",
         {"scale": 1.0}),
    Node("SAG node", "ComfyUI's SelfAttentionGuidance, as its node starts", "nodes_sag", "SelfAttentionGuidance",
         {"scale": 0.5, "blur_sigma": 2.0}),
)}  # fmt: skip
