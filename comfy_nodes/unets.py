"""Merging in a UNet: which of the calls that ask the slot are self-attentions of its blocks, and at which level."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from . import slot
from .engine import hosting
from .sampling import is_left_out

_OTHER_KEYS = "queries and keys are not of the same tokens"
_REPLACED = f"no attention was called: {hosting.REPLACED}"


class UnetMerging:
    """A UNet in one sampling. state: the engine's; told: see `slot.tell`.

    An attention is known by what transformer_options tell: its block, and its transformer block in there. Raises
    UnsupportedModelError or TypeError for a model without blocks that are known.
    """

    flows = False

    def __init__(self, unet: Any, config: Any, options: dict[str, Any]) -> None:
        self.state, self.told = hosting.patch_of(unet, config), slot.tell(options)
        adapter, covered = self.state.adapter, [one.covered for one in self.state.report().levels]
        first = getattr(adapter.places[0].block, "attn1", None)
        function = getattr(type(first).forward, "__globals__", {}).get("optimized_attention")
        self.state.attention_function = slot.name_in_force(function, options)
        self.state.ask_whether_it_pays()
        self._sites = {
            _told_of(place.path): (adapter.levels[place.halvings], place.halvings) for place in adapter.places
            if covered[adapter.levels[place.halvings]] and not getattr(place.block, "disable_self_attn", False)
        }  # fmt: skip

    @contextmanager
    def answering(self, call: Any, latent: torch.Tensor, options: dict[str, Any]) -> Iterator[slot.Ask]:
        """What answers the attentions of one call of the UNet, of these latents; those that never ask are counted."""
        missing, before, has_asked = Counter(self._sites.values()), None, False

        def ask(asked: slot.HostCall, told: dict[str, Any]) -> torch.Tensor:
            nonlocal before, has_asked
            place, last, has_asked = (told.get("block"), told.get("block_index")), before, True
            before = place
            # a block asks for its self-attention, for that to the prompt, and then, in films, for those over time
            found = None if place == last else self._sites.get(place)
            if found is None or _is_replaced(*place, told):
                return asked.unmerged()
            missing[found] -= 1
            level, halvings = found
            queries, keys = asked.q.shape[1], asked.k.shape[1]
            if queries != keys:
                self.state.leave_alone(call, level, _OTHER_KEYS, len(asked.q), queries, keys)
                return asked.unmerged()
            layout_of = partial(_layout, told.get("activations_shape"), latent, halvings)
            return hosting.answer(self.state, call, place, level, 1, layout_of, [], asked)

        yield ask
        if not is_left_out(options):
            self._count(call, latent, missing, has_asked)

    def _count(self, call: Any, latent: torch.Tensor, missing: Counter, has_asked: bool) -> None:
        for (level, halvings), count in missing.items():
            if call.rules[level].attn is None or count <= 0:
                continue
            if not has_asked:
                self.state.leave_alone(call, level, _REPLACED, 0, 0, 0)
                continue
            height, width = _sides(latent, halvings)
            for _ in range(count):
                self.state.leave_alone(call, level, hosting.REPLACED, len(latent), height * width, height * width)


def _told_of(path: str) -> tuple[tuple[str, int], int]:
    """Of ``input_blocks.1.1.transformer_blocks.0``: ``("input", 1), 0``, as transformer_options have it."""
    stage, number, *_, index = path.split(".")
    kind = stage.partition("_")[0]
    return (kind, 0 if kind == "middle" else int(number)), int(index)


def _is_replaced(block: tuple[str, int], index: int, told: dict[str, Any]) -> bool:
    """Does another node stand in for this block's self-attention?"""
    others = told.get("patches_replace", {}).get("attn1", {})
    return block in others or (*block, index) in others


def _layout(shape: list[int] | None, latent: torch.Tensor, halvings: int, tokens: int) -> Any | str:
    """shape: of the block's input, ``[B, C, H, W]``, if the host tells."""
    for height, width in ((shape or (0, 0))[-2:], _sides(latent, halvings)):
        if height * width == tokens:
            return hosting.Layout(hosting.Grid(height, width))
    return hosting.NO_GRID


def _sides(latent: torch.Tensor, halvings: int) -> tuple[int, int]:
    height, width = (-(-side // 2**halvings) for side in latent.shape[-2:])
    return height, width
