"""Merging in ComfyUI's transformers: whole blocks, and attentions of sequences that are known to hold the picture's."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from . import blocks, host, slot_calls, slot_function
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
# names of a model's lists of blocks, in the order in which they run
_LISTS = ("joint_blocks", "double_blocks", "single_blocks", "double_layers", "single_layers", "double_stream_blocks",
          "single_stream_blocks", "blocks", "transformer_blocks", "visual_transformer_blocks", "layers")  # fmt: skip
_NO_PICTURE = hosting.Reason("the model draws neither a picture nor a video")


class TransformerMerging:
    """The merging of an uncompiled transformer in one sampling. `state` is the engine's."""

    flow_timesteps, is_compiled = True, False  # a flow model's timesteps are 1000 * sigma

    def __init__(self, model: Any, config: Any, options: dict[str, Any]) -> None:
        if host.is_compiled_whole(model, options) is not None:
            raise hosting.UnsupportedModelError(host.COMPILED)
        self.state, self._model = hosting.state_of(config, patch_size_of(model)[2], model), model
        self.others = blocks.OtherNodesAttention()
        lists = ((name, getattr(model, name, None)) for name in _LISTS)
        every = [(f"{name}.{number}", block) for name, several in lists if isinstance(several, torch.nn.ModuleList)
                 for number, block in enumerate(several)]  # fmt: skip
        self._blocks = []
        if "blocks" in self.state.ways.get(0, ()):
            self._blocks = [_Block(self, block, path) for path, block in hosting.middle(every)]

    @contextmanager
    def answering(self, call: Any, latent: torch.Tensor, options: dict[str, Any]) -> Iterator[slot_function.Ask]:
        """Yield the function that computes the attentions of a `call` of `State.begin`; `latent` gives the grid."""
        grid, tally = grid_of(self._model, latent), self.state.ledger.levels[0]

        def ask(attention: slot_calls.HostCall, facts: dict[str, Any]) -> torch.Tensor:
            tokens, heads, width = attention.q.shape[1:]
            tally.channels = tally.channels or heads * width
            if self._blocks:
                self.others.note(attention)
            if call.inside is not None:  # in a block that runs on merged tokens
                if attention.k.shape[1] == tokens >= call.inside[2]:
                    self.state.count_inside(call, 0, tokens)
                return attention.unmerged()
            place = facts.get("block_type"), facts.get("block_index")
            where = partial(where_tokens_lie, self._model, grid, options=facts) if grid else lambda tokens: _NO_PICTURE
            return hosting.attend_call(self.state, call, place, 0, 1, where, [], attention)

        with blocks.merging(self._blocks, call, latent):
            yield ask

    def layout_in_block(self, latent: torch.Tensor, options: dict[str, Any], tokens: int) -> Any:
        """Return the picture's `Layout` in a sequence of so many tokens of a block, or why it is not known."""
        grid = grid_of(self._model, latent)
        if grid is None:
            return _NO_PICTURE
        return hosting.REFERENCES if options.get(_REFERENCES) else where_tokens_lie(self._model, grid, tokens, options)


class _Block(blocks.Block):
    """A block of a transformer; `path` is its path in the model."""

    def __init__(self, merging: TransformerMerging, block: torch.nn.Module, path: str) -> None:
        super().__init__(block, hosting.Place(path, 0, "block", "blocks", pools=True), merging.others)
        self._layout, self._names = merging.layout_in_block, hosting.names_of(block)

    def merge(self, call: Any, latent: torch.Tensor, options: dict[str, Any], args: tuple, kwargs: dict) -> Any:
        """Run the block on merged tokens if it can, else on all; return its output. See `blocks.Block.merge`."""
        layout_of, why = partial(self._layout, latent, options), partial(self.others.why, options, (True,))
        return hosting.run_pooled(
            call, self.place, layout_of, self.below, self.original, self._names, args, kwargs, why)


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
