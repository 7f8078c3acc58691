"""Merging in a UNet: which of the calls that ask the slot are self-attentions of its blocks, and at which level."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from . import asking, host, slot
from .host import hosting
from .sampling import is_left_out

_OTHER_KEYS = "queries and keys are not of the same tokens"


class UnetMerging:
    """A UNet in one sampling. state: the engine's. Raises as `hosting.patch_of` does."""

    flows = False

    def __init__(self, unet: Any, config: Any, options: dict[str, Any]) -> None:
        self.is_compiled = host.is_compiled_whole(unet, options)
        self.state = hosting.patch_of(unet, config)
        adapter, covered = self.state.adapter, [one.covered for one in self.state.report().levels]
        if self.is_compiled is None:
            self.state.ask_whether_it_pays()
        elif not self.is_compiled or hosting.why_not_in_graph(self.state):
            raise hosting.UnsupportedModelError(host.COMPILED)
        self._downsamples = adapter.downsamples
        levels = {_told_of(place.path): adapter.levels[place.halvings] for place in adapter.places
                  if not getattr(place.block, "disable_self_attn", False)}  # fmt: skip
        self._levels = {place: level for place, level in levels.items() if covered[level]}

    @contextmanager
    def answering(self, call: Any, latent: torch.Tensor, options: dict[str, Any]) -> Iterator[asking.Ask]:
        """What answers the attentions of one call of the UNet, of these latents; those that never ask are counted."""
        missing, seen, before = Counter(self._levels.values()), [], None

        def ask(asked: slot.HostCall, told: dict[str, Any]) -> torch.Tensor:
            nonlocal before
            last, before = before, (told.get("block"), told.get("block_index"))
            place = before
            # a block asks for its self-attention, for that to the prompt, and then, in films, for those over time
            level = None if place == last else self._levels.get(place)
            others = told.get("patches_replace", {}).get("attn1", {})  # another node's
            if level is None or place[0] in others or (*place[0], place[1]) in others:
                return asked.unmerged()
            missing[level] -= 1
            sides = told["activations_shape"][-2:] if "activations_shape" in told else self._sides(latent, level)
            layout = hosting.Layout(hosting.Grid(*sides))
            out = hosting.answer(self.state, call, place, level, 1, layout, seen, asked)
            if not seen[-1]:
                self.state.leave_alone(level, _OTHER_KEYS, len(asked.q), asked.q.shape[1], asked.k.shape[1])
            return out

        yield ask
        if not is_left_out(options):
            for level in missing.elements():
                if call.rules[level].attn is not None:
                    tokens = math.prod(self._sides(latent, level))
                    self.state.leave_alone(level, hosting.REPLACED, len(latent), tokens, tokens)

    def _sides(self, latent: torch.Tensor, level: int) -> list[int]:
        return [-(-side // self._downsamples[level]) for side in latent.shape[-2:]]


def _told_of(path: str) -> tuple[tuple[str, int], int]:
    """Of ``input_blocks.1.1.transformer_blocks.0``: ``("input", 1), 0``, as transformer_options have it."""
    stage, number, *_, index = path.split(".")
    kind = stage.partition("_")[0]
    return (kind, 0 if kind == "middle" else int(number)), int(index)
