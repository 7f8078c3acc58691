"""ComfyUI's entry point if this repository is in `custom_nodes/`. The code is in `comfy_nodes/`."""

if __package__:  # a test runner or linter imports this file without a package
    from .comfy_nodes import NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS

    WEB_DIRECTORY = "./comfy_nodes/web"
    __all__ = ["NODE_CLASS_MAPPINGS", "NODE_DISPLAY_NAME_MAPPINGS", "WEB_DIRECTORY"]
