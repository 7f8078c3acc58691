"""Merging in one of ComfyUI's transformers: in every attention that asks the slot and whose tokens' place is known."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from . import slot
from .engine import hosting
from .layouts import grid_of, piece_of, where_tokens_lie

_NO_GRID = "the latent has no grid that is known"


class TransformerMerging:
    """A transformer in one sampling. Its attributes are those of `unets.UnetMerging`."""

    flows = True

    def __init__(self, model: Any, config: Any, options: dict[str, Any]) -> None:
        self.state, self.told, self._model = hosting.state_of(config, piece_of(model)[2]), slot.tell(options), model

    @contextmanager
    def answering(self, call: Any, latent: torch.Tensor, options: dict[str, Any]) -> Iterator[slot.Ask]:
        """What answers the attentions of one call of the model, of these latents."""
        grid = grid_of(self._model, latent)

        def ask(asked: slot.HostCall, told: dict[str, Any]) -> torch.Tensor:
            place = told.get("block_type"), told.get("block_index")
            layout_of = partial(where_tokens_lie, self._model, grid, options=told) if grid else lambda tokens: _NO_GRID
            return hosting.answer(self.state, call, place, 0, 1, layout_of, [], asked)

        yield ask
