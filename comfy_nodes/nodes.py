"""The nodes: ApplyToMe and RemoveToMe on a model, ToMePreview on what was sampled with it."""

from __future__ import annotations

from typing import Any

import torch

from . import host, inputs, picture
from .branch import BranchMerging, unsupported

CATEGORY = "model/patch/unet"
ALIASES = ["token merging", "tomesd", "tome", "speed", "faster sampling"]
PREVIEW_ALIASES = [*ALIASES, "merge map", "token map"]
HIDDEN = {"unique_id": "UNIQUE_ID"}
TOO_OLD = "Token merging: this ComfyUI is older than December 2024 and has no keyed wrappers; the model is unchanged."
OFF_TEXT = "Token merging is off: the preset is off, the model is unchanged."
NO_MAPS = (
    "No merge map. Either this model has no ApplyToMe, or nothing merged, or the model is compiled, or the sampler's "
    "result came from the cache: then change its seed and queue again."
)
STRETCHED = (
    " (stretched: the last call was not of this picture's size. It was a tile or an area of it, or the picture was "
    "scaled)"
)


class ApplyToMe:
    """Merges tokens in this branch's samplings."""

    DISPLAY_NAME = "Apply ToMe (Token Merging)"
    DESCRIPTION = (
        "Merges similar tokens in the UNet's blocks, so that sampling takes less time: the larger the picture, the "
        "more. For SD1.x, SD2.x and SDXL. Only samplers behind this node are changed. After sampling the node shows "
        "what merged."
    )
    CATEGORY = CATEGORY
    SEARCH_ALIASES = ALIASES
    FUNCTION = "apply"
    RETURN_TYPES = ("MODEL",)
    OUTPUT_TOOLTIPS = ("The model, merging tokens while it samples.",)

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, dict]:
        """Made from the engine's settings."""
        types = inputs.input_types()
        model = ("MODEL", {"tooltip": "The model to speed up. Models without such a UNet pass through unchanged."})
        return {"required": {"model": model, **types["required"]}, "optional": types["optional"], "hidden": HIDDEN}

    @classmethod
    def VALIDATE_INPUTS(cls, **values: Any) -> bool | str:
        """True, or what is wrong: asked when the prompt is queued, so that nothing is refused half way."""
        try:
            inputs.config_of(values)
        except (TypeError, ValueError) as error:
            return str(error)
        return True

    def apply(self, model: Any, unique_id: Any = None, **values: Any) -> tuple[Any]:
        """A clone of the model that merges; an equal clone where it cannot, and the node says why."""
        clone = model.clone()
        if not host.can_wrap(clone):
            host.show(TOO_OLD, unique_id)
            return (clone,)
        host.detach(clone)
        problem = unsupported(clone.model)
        try:
            config = inputs.config_of(values)
        except (TypeError, ValueError) as error:  # linked values are not seen by VALIDATE_INPUTS
            problem = str(error)
            config = None
        if problem is not None or config is None:
            text = f"Token merging stepped aside, the model is unchanged: {problem}" if problem else OFF_TEXT
            host.show(text, unique_id)
            return (clone,)
        merging = BranchMerging(
            config, unique_id, clone.model.diffusion_model, lambda: host.preview_waits_for(unique_id, "ToMePreview")
        )
        host.attach(clone, merging.apply_model, merging.outer_sample)
        return (clone,)


class RemoveToMe:
    """Takes our merging off a branch."""

    DISPLAY_NAME = "Remove ToMe (Token Merging)"
    DESCRIPTION = "Takes off what Apply ToMe put on, for the samplers behind this node. Every other patch stays."
    CATEGORY = CATEGORY
    SEARCH_ALIASES = ALIASES
    FUNCTION = "remove"
    RETURN_TYPES = ("MODEL",)
    OUTPUT_TOOLTIPS = ("The model without our merging.",)

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, dict]:
        """The model, and the node's own number for its message."""
        model = ("MODEL", {"tooltip": "A model that went through Apply ToMe; any other passes through unchanged."})
        return {"required": {"model": model}, "hidden": HIDDEN}

    def remove(self, model: Any, unique_id: Any = None) -> tuple[Any]:
        """A clone of the model that no longer merges by us."""
        clone = model.clone()
        removed = host.detach(clone)
        text = "Token merging was removed." if removed else "There was no Apply ToMe on this model."
        if host.has_built_in_merging(clone):
            text += " ComfyUI's own TomePatchModel is on it and still merges."
        host.show(text, unique_id)
        return (clone,)


class ToMePreview:
    """Shows which tokens merged."""

    DISPLAY_NAME = "ToMe Preview (Token Merging)"
    DESCRIPTION = (
        "Shows which tokens merged in the latest sampling with this model: equal colours side by side are one group, "
        "uncoloured tokens merged with none. One panel for each level that merged."
    )
    CATEGORY = CATEGORY
    SEARCH_ALIASES = PREVIEW_ALIASES
    FUNCTION = "preview"
    RETURN_TYPES = ("IMAGE",)
    OUTPUT_TOOLTIPS = ("The pictures with their merged tokens coloured, the levels side by side.",)

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, dict]:
        """A model, and the result of sampling with it: either kind makes the preview wait for the sampler."""
        model = ("MODEL", {"tooltip": "The model as it went into the sampler."})
        image = ("IMAGE", {"tooltip": "The decoded pictures, to draw over."})
        latent = ("LATENT", {"tooltip": "The sampler's result, to draw over a rough picture of it. An image is nicer."})
        return {"required": {"model": model}, "optional": {"image": image, "latent": latent}, "hidden": HIDDEN}

    def preview(
        self, model: Any, image: torch.Tensor | None = None, latent: dict | None = None, unique_id: Any = None
    ) -> tuple[torch.Tensor]:
        """Pictures ``[B, H, W * levels, 3]``."""
        pictures = _background(model, image, latent)
        merging = host.attached(model)
        maps = merging.maps() if merging is not None else {}
        if not maps:
            host.show(NO_MAPS, unique_id)
            return (torch.stack([picture.titled(one, NO_MAPS) for one in pictures]),)
        return (torch.stack([_panels(one, number, len(pictures), maps) for number, one in enumerate(pictures)]),)


def _background(model: Any, image: torch.Tensor | None, latent: dict | None) -> torch.Tensor:
    if image is not None:
        return image.detach().float().cpu()[..., :3]
    if latent is not None:
        return picture.from_latent(latent["samples"], getattr(model.model, "latent_format", None))
    return torch.full((1, 512, 512, 3), 0.5)


def _panels(one: torch.Tensor, sample: int, batch: int, maps: dict[int, tuple[int, Any]]) -> torch.Tensor:
    panels = []
    for level, (downsample, found) in maps.items():
        group = picture.row_of(found.group, sample, batch)
        title = f"level {level} (latent /{downsample}): {len(group)} tokens -> {found.num_groups}"
        token = 8 * downsample  # in pixels along each side
        if any(abs(side * token - pixels) >= token for side, pixels in zip(found.grid, one.shape, strict=False)):
            title += STRETCHED
        panels.append(picture.panel(one, tuple(found.grid), group, title))
    return torch.cat(panels, dim=1)
