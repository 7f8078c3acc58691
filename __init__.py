"""ComfyUI's entry when this repository lies in `custom_nodes/`; everything is in `comfy_nodes/`."""

if __package__:  # without a package it is a test runner or a linter that came by, not a host
    from .comfy_nodes import NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS

    WEB_DIRECTORY = "./comfy_nodes/web"
    __all__ = ["NODE_CLASS_MAPPINGS", "NODE_DISPLAY_NAME_MAPPINGS", "WEB_DIRECTORY"]
