"""Merging in one of ComfyUI's transformers: in every attention that asks the slot and whose tokens' place is known."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from . import asking, host, slot
from .host import hosting

# by name: transformers whose sequence is text, the picture, then reference pictures, of which transformer_options tell
_TEXT_FIRST = frozenset({
    "Flux", "Chroma", "MMDiT", "MMDIT", "OpenAISignatureMMDITWrapper", "QwenImageTransformer2DModel", "HunyuanVideo",
    "SingleStreamDiT",
})  # fmt: skip
# Z-Image's and Lumina 2's: text, references, then the picture, filled up to a multiple of `pad_tokens_multiple`
_PICTURE_LAST = frozenset({"NextDiT"})
# these run a text by itself through attentions first, which no "block_type" in transformer_options tells
_REFINE_TEXT = frozenset({"HunyuanVideo", "NextDiT", "SingleStreamDiT"})
_REFERENCES = "reference_image_num_tokens"  # in transformer_options: tokens of each
BESIDE = "tokens beside the picture's, and nobody knows where"
REFINED = "tokens before the model's blocks, maybe a text's"
_NO_GRID = "the latent has no grid that is known"


class TransformerMerging:
    """A transformer in one sampling. Its attributes are those of `unets.UnetMerging`."""

    flows, is_compiled = True, False

    def __init__(self, model: Any, config: Any, options: dict[str, Any]) -> None:
        if host.is_compiled_whole(model, options) is not None:
            raise hosting.UnsupportedModelError(host.COMPILED)
        self.state, self._model = hosting.state_of(config, piece_of(model)[2]), model

    @contextmanager
    def answering(self, call: Any, latent: torch.Tensor, options: dict[str, Any]) -> Iterator[asking.Ask]:
        """What answers the attentions of one call of the model, of these latents."""
        grid = grid_of(self._model, latent)

        def ask(asked: slot.HostCall, told: dict[str, Any]) -> torch.Tensor:
            place = told.get("block_type"), told.get("block_index")
            layout_of = partial(where_tokens_lie, self._model, grid, options=told) if grid else lambda tokens: _NO_GRID
            return hosting.answer(self.state, call, place, 0, 1, layout_of, [], asked)

        yield ask


def piece_of(model: Any) -> tuple[int, int, int] | None:
    """Frames, height and width of the piece of a latent that is a token; None for a model that does not tell."""
    patch = getattr(model, "patch_size", None)
    if patch is None and hasattr(model, "patch_spatial"):
        patch = (getattr(model, "patch_temporal", 1), model.patch_spatial, model.patch_spatial)
    if patch is None:
        patch = getattr(getattr(model, "patchifier", None), "patch_size", None) or getattr(model, "patch", None)
    if isinstance(patch, int) and not isinstance(patch, bool):
        patch = (1, patch, patch)
    if not isinstance(patch, (tuple, list)) or not all(isinstance(one, int) and one > 0 for one in patch):
        return None
    return {2: (1, *patch), 3: tuple(patch)}.get(len(patch))


def grid_of(model: Any, latent: Any) -> Any | None:
    """The tokens of a latent ``[B, C, (frames,) H, W]``, whose borders are filled up to whole tokens."""
    patch = piece_of(model)
    if patch is None or not torch.is_tensor(latent) or latent.dim() not in (4, 5):
        return None
    sides = latent.shape[2:] if latent.dim() == 5 else (1, *latent.shape[2:])
    frames, height, width = (-(-side // piece) for side, piece in zip(sides, patch, strict=True))
    return hosting.Grid(frames * height, width, frames)


def where_tokens_lie(model: Any, grid: Any, tokens: int, options: dict) -> Any | str:
    """Of a sequence of so many tokens; a sentence where that is not known. options: transformer_options of the call."""
    names = {kind.__name__ for kind in type(model).__mro__}
    if names & _REFINE_TEXT and not options.get("block_type"):
        return f"{tokens} {REFINED}"
    beside = tokens - grid.height * grid.width
    if beside < 0:
        return "fewer tokens than the picture has"
    if beside == 0:
        return hosting.Layout(grid)
    if names & _PICTURE_LAST:
        first = beside - -(grid.height * grid.width) % (getattr(model, "pad_tokens_multiple", None) or 1)
    elif names & _TEXT_FIRST:
        first = beside - sum(options.get(_REFERENCES) or ())
        # an earlier ComfyUI's HunyuanVideo: references lie before its film, of a length that nobody tells
        if any(getattr(block, "flipped_img_txt", False) for block in getattr(model, "double_blocks", ())):
            first = -1
    else:
        first = -1
    return hosting.Layout(grid, first) if first >= 0 else f"{beside} {BESIDE}"
