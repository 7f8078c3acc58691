"""Merging in a UNet: finds the self-attentions of its blocks, and their levels, among the calls to the slot."""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from . import host, slot_calls, slot_function
from .host import hosting
from .sampling import is_left_out

_OTHER_KEYS = "queries and keys are not of the same tokens"


class UnetMerging:
    """The merging of a UNet in one sampling. UnsupportedModelError: it cannot merge; TypeError: it is no model.

    `is_compiled` is True if the UNet is compiled as a whole, None if not at all; a UNet compiled in parts cannot merge.
    """

    flow_timesteps = False  # of a flow model, only transformers have the timesteps 1000 * sigma

    def __init__(self, unet: Any, config: Any, options: dict[str, Any]) -> None:
        self.is_compiled = host.is_compiled_whole(unet, options)
        unet = hosting.find_unet(unet)
        adapter = hosting.adapter_of(unet)
        self.state = hosting.State(config, adapter.tallies())
        covered = [level.covered for level in self.state.report().levels]
        if self.is_compiled is None:
            self.state.pays = hosting.pays_of(self.state.clock.rules, unet, adapter)
        elif not self.is_compiled or hosting.why_not_in_graph(self.state):
            raise hosting.UnsupportedModelError(host.COMPILED)
        self._downsamples = adapter.downsamples
        levels = {_options_of(place.path): adapter.levels[place.halvings] for place in adapter.places
                  if not getattr(place.block, "disable_self_attn", False)}  # fmt: skip
        self._levels = {place: level for place, level in levels.items() if covered[level]}
        wanted = {level for level, ways in self.state.levels.items() if "blocks" in ways}
        for level in wanted if self.is_compiled else ():  # a compiled model would not see that its blocks are replaced
            self.state.ledger.note_traced(level, hosting.PARTS_COMPILED)
        places = [] if self.is_compiled else [place for place in adapter.places
                                              if adapter.levels[place.halvings] in wanted]  # fmt: skip
        stacks = {path: [place for place in places if place.path.rpartition(".")[0] == path]
                  for path in dict.fromkeys(place.path.rpartition(".")[0] for place in places)}  # fmt: skip
        # by path, with the level: the blocks of a transformer that may run on merged tokens, all but the first
        self._stacks = {path: (adapter.levels[stack[0].halvings], [place.block for place in stack[1:]])
                        for path, stack in stacks.items() if len(stack) > 1}  # fmt: skip

    @contextmanager
    def answering(self, call: Any, latent: torch.Tensor, options: dict[str, Any]) -> Iterator[slot_function.Ask]:
        """Yield a call's `Ask`. If not skipped by EasyCache, missing attentions of merging levels count as unmerged."""
        missing, seen, before = Counter(self._levels.values()), [], None

        def ask(attention: slot_calls.HostCall, facts: dict[str, Any]) -> torch.Tensor:
            nonlocal before
            last, before = before, (facts.get("block"), facts.get("block_index"))
            place = before
            if call.merged_tokens is not None:
                if place != last and place in self._levels:  # its self-attention
                    self.state.count_in_merged_block(call, self._levels[place])
                    missing[self._levels[place]] -= 1
                return attention.unmerged()
            # a block's first call is its self-attention; cross-attention and attention over time follow
            level = None if place == last else self._levels.get(place)
            others = facts.get("patches_replace", {}).get("attn1", {})  # of other nodes
            if level is None or place[0] in others or (*place[0], place[1]) in others:
                return attention.unmerged()
            missing[level] -= 1
            sides = facts["activations_shape"][-2:] if "activations_shape" in facts else self._sides(latent, level)
            layout = hosting.Layout(hosting.Grid(*sides))
            out = hosting.attend_call(self.state, call, place, level, 1, layout, seen, attention)
            if not seen[-1]:
                self.state.count_unmerged(level, _OTHER_KEYS, *attention.q.shape[:2], attention.k.shape[1])
            return out

        with self._merging_blocks(call, latent, options):
            yield ask
        if not is_left_out(options):
            for level in missing.elements():
                if call.rules[level].attn is not None:
                    tokens = math.prod(self._sides(latent, level))
                    self.state.count_unmerged(level, hosting.REPLACED, len(latent), tokens, tokens)

    @contextmanager
    def _merging_blocks(self, call: Any, latent: torch.Tensor, options: dict[str, Any]) -> Iterator[None]:
        """Replace blocks' forwards while a call runs, if a rule merges whole blocks, which use no slot."""
        before = []
        try:
            for path, (level, blocks) in self._stacks.items():
                if call.rules[level].blocks is None:
                    continue
                grid, why = hosting.Grid(*self._sides(latent, level)), hosting.why_not_merged(blocks, (options,), {})
                for number, block in enumerate(blocks):
                    before.append((block, vars(block).get("forward")))
                    ends = number == 0, number == len(blocks) - 1
                    block.forward = partial(self._run_block, block.forward, (call, path, level, grid), (*ends, why))
            yield
        finally:
            for block, forward in before:
                if forward is None:
                    del block.forward
                else:
                    block.forward = forward

    def _run_block(
        self, forward: Callable, where: tuple, ends_and_why: tuple[bool, bool, str], x: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Return a block's output by `State.run_block`; `where` and `ends_and_why` are arguments of that."""
        return self.state.run_block(*where, x, lambda y: forward(y, *args, **kwargs), *ends_and_why)

    def _sides(self, latent: torch.Tensor, level: int) -> list[int]:
        """Return [height, width] of a level in tokens, rounded up; level 0 is the finest with attention."""
        return [-(-side // self._downsamples[level]) for side in latent.shape[-2:]]


def _options_of(path: str) -> tuple[tuple[str, int], int]:
    """Convert the path ``input_blocks.1.1.transformer_blocks.0`` to ``("input", 1), 0``. The middle block has 0.

    The results are "block" and "block_index" in the transformer_options of the path's attentions.
    """
    stage, number, *_, index = path.split(".")
    kind = stage.partition("_")[0]
    return (kind, 0 if kind == "middle" else int(number)), int(index)
