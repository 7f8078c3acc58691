"""Merging in a UNet: finds the self-attentions of its blocks, and their levels, among the calls to the slot."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from . import blocks, host, slot_calls, slot_function
from .host import hosting
from .sampling import is_left_out


class UnetMerging:
    """The merging of a UNet in one sampling. UnsupportedModelError: it cannot merge; TypeError: it is no model.

    `is_compiled` is True if the UNet is compiled as a whole, None if not at all; a UNet compiled in parts cannot merge.
    """

    flow_timesteps = False  # of a flow model, only transformers have the timesteps 1000 * sigma

    def __init__(self, unet: Any, config: Any, options: dict[str, Any]) -> None:
        self.is_compiled = host.is_compiled_whole(unet, options)
        unet = hosting.find_unet(unet)
        adapter = hosting.adapter_of(unet)
        self.state = hosting.State(config, adapter.tallies(), outside=adapter.outside)
        covered = [level.covered for level in self.state.report().levels]
        if self.is_compiled is None:
            self.state.pays = hosting.pays_of(self.state.clock.rules, unet, adapter)
        elif not self.is_compiled or hosting.why_not_in_graph(self.state):
            raise hosting.UnsupportedModelError(host.COMPILED)
        self._downsamples = adapter.downsamples
        self.others = blocks.OtherNodesAttention()
        levels = {_options_of(place.path): adapter.levels[place.halvings] for place in adapter.places
                  if not getattr(place.block, "disable_self_attn", False)}  # fmt: skip
        self._levels = {place: level for place, level in levels.items() if covered[level]}
        wanted = {level for level, ways in self.state.ways.items() if "blocks" in ways}
        for level in wanted if self.is_compiled else ():  # a compiled model would not see that its blocks are replaced
            self.state.ledger.note_traced(level, hosting.PARTS_COMPILED)
        # the blocks that may run on merged tokens: all of a transformer but the first
        self._blocks = [] if self.is_compiled else [
            _Block(self, place.block, place.path, level) for place in adapter.places
            if (level := adapter.levels[place.halvings]) in wanted and not place.path.endswith(".0")]  # fmt: skip

    @contextmanager
    def answering(self, call: Any, latent: torch.Tensor, options: dict[str, Any]) -> Iterator[slot_function.Ask]:
        """Yield a call's `Ask`. If not skipped by EasyCache, missing attentions of merging levels count as unmerged."""
        missing, before = dict(self._levels), None
        # of each level if no other node changes the size inside the model
        usual = [math.prod(self.sides(latent, level, {})) for level in range(len(self._downsamples))]

        def ask(attention: slot_calls.HostCall, facts: dict[str, Any]) -> torch.Tensor:
            nonlocal before
            last, before = before, (facts.get("block"), facts.get("block_index"))
            place = before
            if self._blocks:
                self.others.note(attention)
            if call.inside is not None:  # in a block that runs on merged tokens
                if place != last and place in self._levels:  # its self-attention
                    self.state.count_inside(call, self._levels[place])
                    missing.pop(place, None)
                return attention.unmerged()
            # a block's first call is its self-attention; cross-attention and attention over time follow
            level = None if place == last else self._levels.get(place)
            others = facts.get("patches_replace", {}).get("attn1", {})  # of other nodes
            if level is None or place[0] in others or (*place[0], place[1]) in others:
                return attention.unmerged()
            missing.pop(place, None)
            grid, shape = hosting.Grid(*self.sides(latent, level, facts)), attention.q.shape
            tokens = grid.height * grid.width
            if shape[1] != tokens or attention.k.shape[:2] != shape[:2]:
                why = slot_calls.why_of_patches(facts) or (
                    hosting.NO_GRID if attention.k.shape[:2] == shape[:2] else hosting.OF_OTHERS)  # fmt: skip
            else:
                sizes = tokens, usual[level]
                why = self._why_shrunk(call, level, latent, sizes, facts) if tokens < usual[level] else ""
            if why:
                self.state.count_unmerged(level, why, *shape[:2])
                return attention.unmerged()
            return hosting.attend_call(self.state, call, place, level, 1, hosting.Layout(grid), [], attention)

        with blocks.merging(self._blocks, call, latent):
            yield ask
        hosting.quietly(self._count_missing, call, latent, missing, options)

    def _why_shrunk(self, call: Any, level: int, latent: torch.Tensor, sizes: tuple[int, int], options: dict) -> str:
        """Return why a level does not merge if it would at its usual size, else ""; `sizes`: tokens now, usually."""
        (_, why), (rules, _) = (self.state.decide(call, level, size, latent.device) for size in sizes)
        name = slot_calls.names_of_patches(options, "input_block_patch")
        return f"{why}, because another node made the picture smaller{name}" if why and rules.attn is not None else ""

    def _count_missing(
        self, call: Any, latent: torch.Tensor, missing: dict[tuple, int], options: dict[str, Any]
    ) -> None:
        """Count attentions that a call did not reach, levels by place, as unmerged, unless EasyCache skipped all."""
        for place, level in missing.items():
            if call.rules[level].attn is not None and not is_left_out(options):
                tokens, other = math.prod(self.sides(latent, level, {})), _replacement_at(place, options)
                why = hosting.REPLACED + ("" if other is None else f": {hosting.name_of_patch(other)}")
                self.state.count_unmerged(level, why, len(latent), tokens)

    def sides(self, latent: torch.Tensor, level: int, options: dict[str, Any]) -> list[int]:
        """Return [height, width] in tokens of the transformer that a call's transformer_options name.

        Without its "activations_shape" they follow from the latent, halved and rounded up. Level 0 is the finest.
        """
        shape = options.get("activations_shape") or [-(-side // self._downsamples[level]) for side in latent.shape]
        return list(shape[-2:])


class _Block(blocks.Block):
    """A block of a UNet, whose tokens are those of the latent; `path` is its path in the UNet."""

    def __init__(self, merging: UnetMerging, block: torch.nn.Module, path: str, level: int) -> None:
        super().__init__(block, hosting.Place(path, level, "block", path.rpartition(".")[0]), merging.others)
        self._sides = merging.sides

    def merge(self, call: Any, latent: torch.Tensor, options: dict[str, Any], args: tuple, kwargs: dict) -> Any:
        """Run the block on merged tokens if it can, else on all; return its output. See `blocks.Block.merge`."""
        layout = hosting.Layout(hosting.Grid(*self._sides(latent, self.place.level, options)))
        why = partial(self.others.why, options, (True, False))
        return hosting.run_block(call, self.place, layout, self.below, self.original, args, kwargs, why)


def _replacement_at(place: tuple[tuple, int], options: dict[str, Any]) -> Any | None:
    """Return what another node put in the place of a self-attention; None if nothing. `place`: see `_options_of`."""
    others = (options.get("patches_replace") or {}).get("attn1") or {}
    block, index = place
    return others.get((*block, index)) or others.get(block) if block else None


def _options_of(path: str) -> tuple[tuple[str, int], int]:
    """Convert the path ``input_blocks.1.1.transformer_blocks.0`` to ``("input", 1), 0``. The middle block has 0.

    The results are "block" and "block_index" in the transformer_options of the path's attentions.
    """
    stage, number, *_, index = path.split(".")
    kind = stage.partition("_")[0]
    return (kind, 0 if kind == "middle" else int(number)), int(index)
