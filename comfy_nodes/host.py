"""The interface to ComfyUI, which may be an older version or a fork. `hosting` is the interface to the engine."""

import asyncio
import importlib
import logging
import os
import sys
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)
# ComfyUI replaces dots in a pack's name, so a dot in our package's name means that we are inside the pack
hosting = importlib.import_module("..tome_core.hosting" if "." in __package__ else "tome_core.hosting", __package__)

hosting.add_own_folder(os.path.dirname(__file__))  # mistakes of ours cost no picture

NOTE = "tome_note"  # in model_options: the `Outcome` of a branch that does not merge, for nodes after it
KEY = "tome"  # of our wrappers, by which a second ApplyToMe replaces the first
# values of comfy.patcher_extension.WrappersMP, since December 2024
APPLY_MODEL, OUTER_SAMPLE = "apply_model", "outer_sample"
COMPILE_KEY = "torch.compile"  # of ComfyUI's compiling wrapper, which holds the compiled parts by name
COMPILED = "the model is compiled; remove that node to merge"
# Nodes 2.0 (frontend 1.49) renders a node's text as Markdown, which joins lines without two spaces at the end
LINE_BREAK = "  \n"


def is_new_enough(patcher: Any) -> bool:
    """Tell whether ComfyUI's ModelPatcher has keyed wrappers and its attention, if loaded, a slot for functions."""
    attention = sys.modules.get("comfy.ldm.modules.attention")
    return hasattr(patcher, "remove_wrappers_with_key") and (attention is None or hasattr(attention, "wrap_attn"))


def attach(patcher: Any, merging: Any) -> None:
    """Add the two wrappers of a `BranchMerging` to a ModelPatcher in place. Call `detach` first, or old ones stay."""
    patcher.add_wrapper_with_key(APPLY_MODEL, KEY, merging.apply_model)
    patcher.add_wrapper_with_key(OUTER_SAMPLE, KEY, merging.outer_sample)


def detach(patcher: Any) -> bool:
    """Remove ApplyToMe's wrappers and note from a ModelPatcher in place; return whether a node that is on was there."""
    was_merging = find_attached(patcher) is not None  # a branch that is off may have wrappers for timing
    if NOTE in patcher.model_options:
        patcher.model_options = {name: value for name, value in patcher.model_options.items() if name != NOTE}
    for kind in (APPLY_MODEL, OUTER_SAMPLE):
        patcher.remove_wrappers_with_key(kind, KEY)
    return was_merging


def find_attached(patcher: Any) -> Any | None:
    """Return the `BranchMerging` that `attach` added to a ModelPatcher; None if there is none or its node is off."""
    wrappers = getattr(patcher, "wrappers", {}).get(APPLY_MODEL, {}).get(KEY, [])
    merging = getattr(wrappers[-1], "__self__", None) if wrappers else None
    return None if getattr(merging, "config", None) is None else merging


def is_compiled_whole(model: Any, options: dict[str, Any]) -> bool | None:
    """Return True if a diffusion model is compiled as a whole alone, False if in parts (too), None if not at all."""
    wrappers = options.get("wrappers", {}).get(APPLY_MODEL, {}).get(COMPILE_KEY, ())
    held = [cell.cell_contents for wrapper in wrappers for cell in getattr(wrapper, "__closure__", None) or ()]
    inner = getattr(model, "_orig_mod", model)
    is_whole = inner is not model or ["diffusion_model"] in [list(parts) for parts in held if isinstance(parts, dict)]
    in_part = any("_orig_mod" in part._modules or part._compiled_call_impl is not None for part in inner.modules())
    return is_whole and not in_part if is_whole or in_part or wrappers else None


def name_in(prompt: Any, node_id: Any) -> str:
    """Return ``" #12:5 second pass"``: a node's id, and its title in the prompt if not our default; "" for None."""
    if node_id is None:
        return ""
    node = prompt.get(str(node_id)) if isinstance(prompt, dict) else None
    title = str(((node or {}).get("_meta") or {}).get("title") or "")
    return f" #{node_id}" + (f" {title}" if title and "(Token Merging)" not in title else "")


def server() -> Any:
    """Return ComfyUI's ``PromptServer`` instance; None outside ComfyUI, also if another module is called `server`."""
    return getattr(getattr(sys.modules.get("server"), "PromptServer", None), "instance", None)


def say(text: str, node_id: Any, name: str = "") -> None:
    """Show a text under a node and log it in a line, with `name` of `name_in` after "ToMe". Without an id, only log."""
    logger.info("%s", text.replace("ToMe", f"ToMe{name}", 1).replace("\n", "; "))
    show(text, node_id)


def show(text: str, node_id: Any) -> None:
    """Show a text under a node and the subgraphs that contain it; nowhere without an id. Never raises an exception."""
    send = getattr(server(), "send_progress_text", None)
    if send is None or node_id is None:
        return
    try:
        # ``12:5`` is node 5 in subgraph 12; the page shows texts of the open graph only
        parts = str(node_id).split(":")
        for count in range(len(parts), 0, -1):
            send(text.replace("\n", LINE_BREAK), ":".join(parts[:count]))
    except Exception:  # the host's transport, on which no picture may depend
        logger.debug("the message could not be sent to node %s", node_id, exc_info=True)


def at_end_of_prompt(function: Callable[[], None]) -> None:
    """Call a function when ComfyUI has run the prompt whose node runs now; never, if the host does not tell the end.

    ComfyUI has no event for it, but runs a prompt as a task of asyncio since July 2025, and a node inside that task.
    """
    try:
        task = asyncio.current_task()
    except RuntimeError:  # a fork that runs nodes without asyncio
        return
    if task is not None:
        task.add_done_callback(lambda _: hosting.quietly(function))


def gains_file() -> str | None:
    """Return the path of the file of pictures' times, in ComfyUI's user directory; None outside ComfyUI."""
    folder = getattr(sys.modules.get("folder_paths"), "get_user_directory", None)
    return None if folder is None else os.path.join(folder(), "tome_core_gains.json")
