"""Token merging nodes for ComfyUI, as its loader expects them."""

from . import host
from .nodes import ApplyToMe, RemoveToMe, ToMePreview, ToMeSettings

NODE_CLASS_MAPPINGS = {node.__name__: node for node in (ApplyToMe, ToMeSettings, RemoveToMe, ToMePreview)}
NODE_DISPLAY_NAME_MAPPINGS = {name: node.DISPLAY_NAME for name, node in NODE_CLASS_MAPPINGS.items()}
WEB_DIRECTORY = "./web"

for name in ("optimized_attention", "optimized_attention_masked"):  # their names distinguish the times of pictures
    host.hosting.register_name(name)
host.hosting.gains.load(host.gains_file())

__all__ = ["NODE_CLASS_MAPPINGS", "NODE_DISPLAY_NAME_MAPPINGS", "WEB_DIRECTORY"]
