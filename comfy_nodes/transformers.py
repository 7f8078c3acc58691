"""Merging in ComfyUI's transformers: in each attention whose sequence is known to hold the picture's tokens."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from . import host, slot_calls, slot_function
from .host import hosting

# transformers whose sequence is text, picture, reference pictures; transformer_options have the references' lengths
_TEXT_FIRST = frozenset({
    "Flux", "Chroma", "MMDiT", "MMDIT", "OpenAISignatureMMDITWrapper", "QwenImageTransformer2DModel", "HunyuanVideo",
    "SingleStreamDiT",
})  # fmt: skip
# Z-Image and Lumina 2: text, references, picture; the picture is padded to a multiple of `pad_tokens_multiple`
_PICTURE_LAST = frozenset({"NextDiT"})
# transformers that first refine the text in attentions of their own, without a "block_type" in transformer_options
_REFINE_TEXT = frozenset({"HunyuanVideo", "NextDiT", "SingleStreamDiT"})
_REFERENCES = "reference_image_num_tokens"  # in transformer_options: number of tokens of each reference
BESIDE = hosting.Reason("it is not known which tokens are the picture's")
PART = "it gets only a part of the picture"
_NO_PICTURE = hosting.Reason("the model draws neither a picture nor a video")


class TransformerMerging:
    """The merging of an uncompiled transformer in one sampling. `state` is the engine's."""

    flow_timesteps, is_compiled = True, False  # a flow model's timesteps are 1000 * sigma

    def __init__(self, model: Any, config: Any, options: dict[str, Any]) -> None:
        if host.is_compiled_whole(model, options) is not None:
            raise hosting.UnsupportedModelError(host.COMPILED)
        self.state, self._model = hosting.state_of(config, patch_size_of(model)[2], model), model

    @contextmanager
    def answering(self, call: Any, latent: torch.Tensor, options: dict[str, Any]) -> Iterator[slot_function.Ask]:
        """Yield the function that computes the attentions of a `call` of `State.begin`; `latent` gives the grid."""
        grid = grid_of(self._model, latent)

        def ask(attention: slot_calls.HostCall, facts: dict[str, Any]) -> torch.Tensor:
            place = facts.get("block_type"), facts.get("block_index")
            where = partial(where_tokens_lie, self._model, grid, options=facts) if grid else lambda tokens: _NO_PICTURE
            return hosting.attend_call(self.state, call, place, 0, 1, where, [], attention)

        yield ask


def patch_size_of(model: Any) -> tuple[int, int, int] | None:
    """Return a token's (frames, height, width) in latent cells; None if the model shows none, as a UNet."""
    patch = getattr(model, "patch_size", None)
    if patch is None and hasattr(model, "patch_spatial"):
        patch = (getattr(model, "patch_temporal", 1), model.patch_spatial, model.patch_spatial)
    if patch is None:
        patch = getattr(getattr(model, "patchifier", None), "patch_size", None) or getattr(model, "patch", None)
    if isinstance(patch, int) and not isinstance(patch, bool):
        patch = (1, patch, patch)
    if not isinstance(patch, (tuple, list)) or not all(isinstance(size, int) and size > 0 for size in patch):
        return None
    return {2: (1, *patch), 3: tuple(patch)}.get(len(patch))


def grid_of(model: Any, latent: Any) -> Any | None:
    """Return the `Grid` of a 4D or 5D tensor's tokens, edges padded, frames below one another; None if not known."""
    patch = patch_size_of(model)
    if patch is None or not torch.is_tensor(latent) or latent.dim() not in (4, 5):
        return None
    sides = latent.shape[2:] if latent.dim() == 5 else (1, *latent.shape[2:])
    frames, height, width = (-(-side // piece) for side, piece in zip(sides, patch, strict=True))
    return hosting.Grid(frames * height, width, frames)


def where_tokens_lie(model: Any, grid: Any, tokens: int, options: dict) -> Any:
    """Return the `Layout` of the picture's tokens in a sequence of `tokens`, or why their place is not known.

    The model's class and the lengths of references in `options`, transformer_options, decide where tokens beside the
    picture's are. If the class first refines its text, only a "block_type" in `options` tells that these are the
    picture's.
    """
    names = {kind.__name__ for kind in type(model).__mro__}
    if names & _REFINE_TEXT and not options.get("block_type"):
        return hosting.REFINED
    beside = tokens - grid.height * grid.width
    if beside < 0:
        return hosting.Reason(slot_calls.why_of_patches(options) or PART)
    if beside == 0:
        return hosting.Layout(grid)
    if names & _PICTURE_LAST:
        first = beside - -(grid.height * grid.width) % (getattr(model, "pad_tokens_multiple", None) or 1)
    elif names & _TEXT_FIRST:
        first = beside - sum(options.get(_REFERENCES) or ())
        # HunyuanVideo in an earlier ComfyUI: references of unknown length precede the video
        if any(getattr(block, "flipped_img_txt", False) for block in getattr(model, "double_blocks", ())):
            first = -1
    else:
        first = -1
    return hosting.Layout(grid, first) if first >= 0 else BESIDE
