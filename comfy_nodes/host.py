"""All that is asked of ComfyUI, which may be older, a fork, or a test; `hosting` is all that is used of the engine."""

from __future__ import annotations

import importlib
import logging
import os
import sys
from typing import Any

logger = logging.getLogger(__name__)
# ComfyUI names a pack by its path with every dot replaced, so a dot means: this is a part of the pack
hosting = importlib.import_module("..tome_core.hosting" if "." in __package__ else "tome_core.hosting", __package__)

NOTE = "tome_note"  # in a branch's model_options: why it does not merge, for nodes behind it
KEY = "tome"  # of our wrappers; a second ApplyToMe finds and replaces the first by it
# values of comfy.patcher_extension.WrappersMP, here since December 2024
APPLY_MODEL, OUTER_SAMPLE = "apply_model", "outer_sample"
COMPILE_KEY = "torch.compile"  # of a wrapper that holds what it puts in the place of parts of the model, by name
COMPILED = "the model is compiled; take that node off to merge"
# Nodes 2.0 (frontend 1.49) reads a node's text as Markdown, which joins lines that end otherwise; the canvas does not
LINE_BREAK = "  \n"


def is_new_enough(patcher: Any) -> bool:
    """Does this ComfyUI have keyed wrappers, and attentions that ask transformer_options for another function?"""
    attention = sys.modules.get("comfy.ldm.modules.attention")
    return hasattr(patcher, "remove_wrappers_with_key") and (attention is None or hasattr(attention, "wrap_attn"))


def attach(patcher: Any, merging: Any) -> None:
    """Put the two wrappers of one node on a ModelPatcher that has none."""
    patcher.add_wrapper_with_key(APPLY_MODEL, KEY, merging.apply_model)
    patcher.add_wrapper_with_key(OUTER_SAMPLE, KEY, merging.outer_sample)


def detach(patcher: Any) -> bool:
    """Take our wrappers off a ModelPatcher, and nothing else. True where there were some."""
    found = find_attached(patcher) is not None  # else maybe what times a branch that is off
    if NOTE in patcher.model_options:
        patcher.model_options = {name: one for name, one in patcher.model_options.items() if name != NOTE}
    for kind in (APPLY_MODEL, OUTER_SAMPLE):
        patcher.remove_wrappers_with_key(kind, KEY)
    return found


def find_attached(patcher: Any) -> Any | None:
    """What `attach` put on, if it merges; else None."""
    wrappers = getattr(patcher, "wrappers", {}).get(APPLY_MODEL, {}).get(KEY, [])
    found = getattr(wrappers[-1], "__self__", None) if wrappers else None
    return None if getattr(found, "config", None) is None else found


def is_compiled_whole(model: Any, options: dict[str, Any]) -> bool | None:
    """Is the whole model under ``torch.compile``, and no part of it by itself? None if nothing of it is."""
    wrappers = options.get("wrappers", {}).get(APPLY_MODEL, {}).get(COMPILE_KEY, ())
    held = [cell.cell_contents for one in wrappers for cell in getattr(one, "__closure__", None) or ()]
    inner = getattr(model, "_orig_mod", model)
    is_whole = inner is not model or ["diffusion_model"] in [list(one) for one in held if isinstance(one, dict)]
    in_part = any("_orig_mod" in one._modules or one._compiled_call_impl is not None for one in inner.modules())
    return is_whole and not in_part if is_whole or in_part or wrappers else None


def name_in(prompt: Any, node_id: Any) -> str:
    """``#12:5 second pass``: a node's number, and its title where somebody has given it one."""
    if node_id is None:
        return ""
    own = prompt.get(str(node_id)) if isinstance(prompt, dict) else None
    title = str(((own or {}).get("_meta") or {}).get("title") or "")
    return f" #{node_id}" + (f" {title}" if title and "(Token Merging)" not in title else "")


def server() -> Any:
    """Of the page. Looked up instead of imported: outside ComfyUI `server` is anybody's module."""
    return getattr(getattr(sys.modules.get("server"), "PromptServer", None), "instance", None)


def say(text: str, node_id: Any, name: str = "") -> None:
    """`show` it, and in the log in one line. name: of the node, see `name_in`."""
    logger.info("%s", text.replace("ToMe", f"ToMe{name}", 1).replace("\n", "; "))
    show(text, node_id)


def show(text: str, node_id: Any) -> None:
    """In the graph, under the node and the subgraphs around it. Never fails: it runs in mid-queue."""
    send = getattr(server(), "send_progress_text", None)
    if send is None or node_id is None:
        return
    try:
        # ``12:5`` is node 5 in the subgraph that node 12 is, and the page shows texts of the graph that is open alone
        parts = str(node_id).split(":")
        for count in range(len(parts), 0, -1):
            send(text.replace("\n", LINE_BREAK), ":".join(parts[:count]))
    except Exception:  # a host's own transport; nobody's picture should depend on it
        logger.debug("the message could not be sent to node %s", node_id, exc_info=True)


def gains_file() -> str | None:
    """For what was measured, in ComfyUI's folder for what belongs to its user; None outside of ComfyUI."""
    folder = getattr(sys.modules.get("folder_paths"), "get_user_directory", None)
    return None if folder is None else os.path.join(folder(), "tome_core_gains.json")
