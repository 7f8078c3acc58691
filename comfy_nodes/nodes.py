"""ComfyUI's nodes: ApplyToMe, ToMeSettings and RemoveToMe for a model, ToMePreview for the result of a sampling."""
# in ComfyUI's first schema (V1), which needs no import of the host, and which all versions that wrap models support

from typing import Any

import torch

from . import host, inputs, picture
from .branch import BranchMerging, Outcome, curve_of, facts_of

ALIASES = ["token merging", "tomesd", "tome", "speed", "faster sampling"]
HIDDEN = {"unique_id": "UNIQUE_ID"}
HIDDEN_PROMPT = {**HIDDEN, "prompt": "PROMPT"}
TOO_OLD = "ToMe: this ComfyUI is older than September 2025; update it to merge. The model is unchanged."
OFF_TEXT = "ToMe is off, the model is unchanged."
OFF_BY_SETTINGS = f"{OFF_TEXT[:-1]}: these settings merge nothing ({{}})."
OFF_BY_RATIO, OFF_BY_CELLS = map(OFF_BY_SETTINGS.format, ("ratio 0", "cells of one token: sx=1, sy=1"))
NOT_APPLIED = "No merge map: there is no Apply ToMe on this model. Connect the model as it went into the sampler."
NOT_WAITING = "No merge map: connect the sampler's latent or the decoded image, so that this node waits for it."
FROM_CACHE = "No merge map: the sampler's result came from the cache. Change its seed and queue again."


class _Node:
    """The base class of the nodes: their place in ComfyUI's menu and the words of its search."""

    CATEGORY = "model/patch/unet"
    SEARCH_ALIASES = ALIASES


class ApplyToMe(_Node):
    """The node that returns a clone of a model that merges by strength or settings, or not at all if off."""

    DISPLAY_NAME = "Apply ToMe (Token Merging)"
    DESCRIPTION = (
        "Makes sampling faster: when the model compares all parts of the picture, parts that are nearly alike (sky, "
        "walls, blur) count as one. Large pictures gain most; a graphics card gains from 512 px on with SD1.x, from "
        "1024 px with SDXL; transformers gain in few steps. "
        "For SD1.x, SD2.x, SDXL, and transformers such as Flux, SD3, Qwen-Image and Wan. Only samplers after "
        "this node change. After sampling the node shows the report."
    )
    FUNCTION = "apply"
    RETURN_TYPES = ("MODEL",)
    OUTPUT_TOOLTIPS = ("The model, which merges tokens while it samples.",)

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, dict]:
        """Return the input types; a prompt may leave out all but the model. ComfyUI fills in the "hidden" ones."""
        model = ("MODEL", {"tooltip": "The model to speed up. Models of other kinds pass through unchanged."})
        return {"required": {"model": model}, "optional": inputs.strength_types(), "hidden": HIDDEN_PROMPT}

    def apply(
        self, model: Any, strength: Any = inputs.STRENGTH, start: Any = 0.0, end: Any = 1.0, settings: Any = None,
        unique_id: Any = None, prompt: Any = None, **unknown: Any,
    ) -> tuple[Any]:  # fmt: skip
        """Return a clone of the model that merges, in a tuple. The node (id: `unique_id`) shows its state as text.

        If the strength is 0, ComfyUI too old, or a value or the model not supported, the clone does not merge. Merging
        goes from `start` to `end`, shares of the schedule. `settings`, a MergeConfig from ToMeSettings, replace the
        strength. `prompt` has ComfyUI's nodes by id; inputs in it that are `unknown` are named and ignored.
        """
        clone = model.clone()
        if not host.is_new_enough(clone):
            host.say(TOO_OLD, unique_id)
            return (clone,)
        host.detach(clone)
        config, text, whys = None, OFF_TEXT, []
        if settings is not None:
            text = OFF_BY_CELLS if getattr(settings, "rules", None) and settings.rules[0].ratio else OFF_BY_RATIO
        try:
            config = inputs.config_of(strength, start, end, settings, curve_of(clone.model))
        except (TypeError, ValueError) as error:  # an unsupported model, a start after the end, or a linked value
            text, whys = f"ToMe stepped aside, the model is unchanged: {error}", [f"stepped aside: {error}"]
        dropped, name = _list_dropped(self, prompt, unique_id), host.name_in(prompt, unique_id)
        facts = facts_of(strength if settings is None else None, start, end, dropped)
        if config is None:
            note = Outcome.unsampled([text, *dropped], facts, whys)
            clone.model_options = {**clone.model_options, host.NOTE: note}
            host.say("\n".join(note.lines), unique_id, name)
            if not whys:  # it is off: its samplings are timed for comparison
                host.attach(clone, BranchMerging(None, "", {}, None, ""))
            return (clone,)
        line = "own settings" if settings is not None else f"strength {strength:g}"
        merging = BranchMerging(config, line, facts, unique_id, name)
        host.attach(clone, merging)
        merging.wait()
        return (clone,)


class ToMeSettings(_Node):
    """The node that provides all settings for an ApplyToMe."""

    DISPLAY_NAME = "ToMe Settings (Token Merging)"
    DESCRIPTION = (
        "All settings of token merging. Connect them to the settings input of Apply ToMe, in place of the strength. "
        "A setting that contradicts the others is ignored, and the node names it."
    )
    FUNCTION = "settings"
    RETURN_TYPES = (inputs.SETTINGS_TYPE,)
    OUTPUT_TOOLTIPS = ("For the settings input of Apply ToMe.",)

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, dict]:
        """Return the input types, generated from the engine's form. A prompt may leave out all inputs."""
        return {"required": {}, "optional": inputs.settings_types(), "hidden": HIDDEN_PROMPT}

    def settings(self, unique_id: Any = None, prompt: Any = None, **values: Any) -> tuple[Any]:
        """Return a MergeConfig of the possible `values`, by field, in a tuple; the node shows what it does not use."""
        config, left_out = inputs.form.keep_possible(values)
        dropped = _list_dropped(self, prompt, unique_id)
        if left_out or dropped:
            text = f"ToMe Settings, not used: {'. '.join([*left_out, *dropped])}"
            host.say(text, unique_id, host.name_in(prompt, unique_id))
        return (config,)


class RemoveToMe(_Node):
    """The node that returns a model without ApplyToMe's merging."""

    DISPLAY_NAME = "Remove ToMe (Token Merging)"
    DESCRIPTION = "Removes Apply ToMe from the model, for the samplers after this node. All other patches stay."
    FUNCTION = "remove"
    RETURN_TYPES = ("MODEL",)
    OUTPUT_TOOLTIPS = ("The model without Apply ToMe.",)

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, dict]:
        """Return the input types: a model, and the node's id, which ComfyUI fills in."""
        model = ("MODEL", {"tooltip": "A model that went through Apply ToMe; other models pass unchanged."})
        return {"required": {"model": model}, "hidden": HIDDEN}

    def remove(self, model: Any, unique_id: Any = None) -> tuple[Any]:
        """Return a clone of the model without ApplyToMe's merging, in a tuple. The node shows whether there was any."""
        clone = model.clone()
        text = "ToMe was removed." if host.detach(clone) else "There was no Apply ToMe on this model."
        host.say(text, unique_id)
        return (clone,)


class ToMePreview(_Node):
    """The node that shows which tokens merged in the latest sampling, and the report on this sampling."""

    DISPLAY_NAME = "ToMe Preview (Token Merging)"
    DESCRIPTION = (
        "Shows which tokens merged in the latest sampling with this model: each group has its mean colour, so the "
        "picture gets coarse if different tokens merged. It has a panel for each level that merged. The report on "
        "the sampling is shown too, and is in the queue's history, as text and as JSON."
    )
    SEARCH_ALIASES = [*ALIASES, "merge map", "token map"]  # noqa: RUF012 (never changed)
    FUNCTION = "preview"
    RETURN_TYPES = ("IMAGE", "STRING")
    RETURN_NAMES = ("image", "report")
    OUTPUT_TOOLTIPS = (
        "The pictures with each group of merged tokens in its mean colour, the levels side by side.",
        "The report on the sampling, as text.",
    )
    OUTPUT_NODE = True  # so that it runs without a node after it

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, dict]:
        """Return the input types: a model, and, both optional, image and latent of a sampling to wait for."""
        model = ("MODEL", {"tooltip": "The model as it went into the sampler."})
        image = ("IMAGE", {"tooltip": "The decoded pictures. The preview is drawn over them."})
        rough = "The sampler's result. The preview is drawn over a rough picture of it; an image looks better."
        latent = ("LATENT", {"tooltip": rough})
        return {"required": {"model": model}, "optional": {"image": image, "latent": latent}, "hidden": HIDDEN}

    def preview(self, model: Any, image: Any = None, latent: Any = None, unique_id: Any = None) -> dict[str, Any]:
        """Draw the groups of merged tokens over the pictures, and return them with the report.

        The pictures are `image` ``[B, H, W, 3]``, else a rough picture of `latent`, ComfyUI's dict, else grey. In the
        node's output "result" has pictures ``[B, H, W * levels, 3]`` and the report as text, "ui" the report as text
        and as JSON values. Without maps, the pictures stay, with a title that says why.
        """
        pictures = _background(model, image, latent)
        merging = host.find_attached(model)
        outcome = model.model_options.get(host.NOTE) if merging is None else merging.latest
        title = None if outcome is None else f"No merge map. {outcome.lines[0]}"
        if outcome is None:
            title = NOT_APPLIED if merging is None else NOT_WAITING if image is None and latent is None else FROM_CACHE
            outcome = Outcome.unsampled([title], facts_of())
        drawn = [_panels(pixels, number - len(pictures), outcome.maps) if outcome.maps
                 else picture.add_title(pixels, title) for number, pixels in enumerate(pictures)]  # fmt: skip
        text = "\n".join(outcome.details)
        data = {**outcome.data, "format": str(outcome.data["format"])}  # if it is no text, ComfyUI lists no jobs
        host.show(text, unique_id)
        return {"ui": {"text": (text,), "tome_report": (data,)}, "result": (torch.stack(drawn), text)}


def _list_dropped(node: Any, prompt: Any, unique_id: Any) -> list[str]:
    """Return a list of one line on the inputs in the prompt that this version of the node lacks; [] without any."""
    types, entry = node.INPUT_TYPES(), prompt.get(str(unique_id)) if isinstance(prompt, dict) else None
    unknown = sorted(set(entry["inputs"]) - {*types["required"], *types["optional"]}) if entry else []
    return [f"this version of the node does not know: {', '.join(unknown)}"] if unknown else []


def _background(model: Any, image: torch.Tensor | None, latent: dict | None) -> torch.Tensor:
    """Return pictures ``[B, H, W, 3]`` on the CPU: the image, else a rough picture of the latent, else a grey one."""
    if image is not None:
        return image.detach().float().cpu()[..., :3]
    if latent is not None:
        return picture.from_latent(latent["samples"], getattr(model.model, "latent_format", None))
    return torch.full((1, 512, 512, 3), 0.5)


def _panels(pixels: torch.Tensor, row: int, maps: dict[int, tuple[int, Any]]) -> torch.Tensor:
    """Return a picture ``[H, W, 3]`` once a level, drawn by `picture.panel`, side by side, ``[H, W * levels, 3]``.

    `row`, counted from the end, is the picture's in each map of `Outcome.maps`; a map with fewer rows gives its first.
    """
    panels = []
    for level, (downsample, merge_map) in maps.items():
        # row is negative, because a call's batch ends with the positive prompt
        group = merge_map.group[max(row, -len(merge_map.group))]
        # in a transformer the map's other groups are of text
        title = f"level {level} (latent /{downsample}): {len(group):,} tokens in {len(group.unique()):,} groups"
        panels.append(picture.panel(pixels, merge_map.grid[:2], group, title))
    return torch.cat(panels, dim=1)
