"""Merging in a UNet: finds the self-attentions of its blocks, and their levels, among the calls to the slot."""

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from . import host, slot_calls, slot_function
from .host import hosting
from .sampling import is_left_out

hosting.register_package("comfy")  # ComfyUI's own blocks, attentions and LoRA layers act on each token alone
_OTHER_KEYS = "queries and keys are not of the same tokens"
_UNTRIED = "another node's attention could not be tried on tokens in another order"


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
        self._overrides: dict[tuple, str] = {}  # by another node's function and "is it self-attention", see `_try`
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
        missing, seen, before = Counter(self._levels.values()), [], None

        def ask(attention: slot_calls.HostCall, facts: dict[str, Any]) -> torch.Tensor:
            nonlocal before
            last, before = before, (facts.get("block"), facts.get("block_index"))
            place = before
            if self._blocks and slot_function.beneath() is not None:
                self._try(attention)
            if call.inside is not None:  # in a block that runs on merged tokens
                if place != last and place in self._levels:  # its self-attention
                    self.state.count_inside(call, self._levels[place])
                    missing[self._levels[place]] -= 1
                return attention.unmerged()
            # a block's first call is its self-attention; cross-attention and attention over time follow
            level = None if place == last else self._levels.get(place)
            others = facts.get("patches_replace", {}).get("attn1", {})  # of other nodes
            if level is None or place[0] in others or (*place[0], place[1]) in others:
                return attention.unmerged()
            missing[level] -= 1
            layout = hosting.Layout(hosting.Grid(*self.sides(latent, level, facts)))
            out = hosting.attend_call(self.state, call, place, level, 1, layout, seen, attention)
            if not seen[-1]:
                self.state.count_unmerged(level, _OTHER_KEYS, *attention.q.shape[:2])
            return out

        with self._merging_blocks(call, latent):
            yield ask
        hosting.quietly(self._count_missing, call, latent, missing, options)

    def _count_missing(self, call: Any, latent: torch.Tensor, missing: Counter[int], options: dict[str, Any]) -> None:
        """Count the attentions of each level that a call did not reach as unmerged, unless EasyCache skipped all."""
        for level in missing.elements():
            if call.rules[level].attn is not None and not is_left_out(options):
                tokens = math.prod(self.sides(latent, level, {}))
                self.state.count_unmerged(level, hosting.REPLACED, len(latent), tokens)

    @contextmanager
    def _merging_blocks(self, call: Any, latent: torch.Tensor) -> Iterator[None]:
        """Replace blocks' forwards while a call runs, if a rule merges whole blocks, which use no slot."""
        on = []
        try:
            for block in self._blocks:
                if call.rules[block.place.level].block is not None:
                    on.append((block, block.put_on(call, latent)))
            yield
        finally:
            for block, before in on:
                block.take_off(before)

    def _try(self, attention: slot_calls.HostCall) -> None:
        """Note whether another node's function in the slot may need every token, by its first call of each kind."""
        kind = attention.override, attention.k.shape[:2] == attention.q.shape[:2]
        if kind in self._overrides:
            return
        try:
            is_good = attention.mask is None and attention.treats_tokens_alike()
        except Exception as error:
            if not hosting.may_be_of_fewer_tokens(error):
                raise
            is_good = False
        name = hosting.full_name(attention.override)
        why = f"another node's attention looks at the order of tokens ({name}); it merges without that"
        self._overrides[kind] = "" if is_good else why

    def why_of_slot(self, options: dict[str, Any]) -> str:
        """Return why a block may need every token because of functions in the slot; "" if none is known."""
        there, beneath = options.get(slot_calls.SLOT), slot_function.beneath()
        if not slot_function.is_ours(there):
            name = hosting.full_name(there)
            return f"another node's attention came into the call ({name}); it merges without that"
        whys = [self._overrides.get((beneath, kind), _UNTRIED) for kind in (True, False)] if beneath else []
        return next(filter(None, whys), "")

    def sides(self, latent: torch.Tensor, level: int, options: dict[str, Any]) -> list[int]:
        """Return [height, width] in tokens of the transformer that a call's transformer_options name.

        Without its "activations_shape" they follow from the latent, halved and rounded up. Level 0 is the finest.
        """
        shape = options.get("activations_shape") or [-(-side // self._downsamples[level]) for side in latent.shape]
        return list(shape[-2:])


class _Block(hosting.Wrap):
    """The replacement of a block's ``forward`` while a call of the branch runs. `path` is the block's in the UNet."""

    def __init__(self, merging: UnetMerging, block: torch.nn.Module, path: str, level: int) -> None:
        super().__init__(block)
        self.place = hosting.Place(path, level, "block", path.rpartition(".")[0])
        self._merging, self._below = merging, hosting.ModulesBelow(block)
        self._call: tuple[Any, torch.Tensor] | None = None  # the call's record and its latent

    def put_on(self, call: Any, latent: torch.Tensor) -> tuple[Any, Any]:
        """Put this on the block for a call; return what `take_off` puts back."""
        own = vars(self.target)  # without the module's own __setattr__, which is slow
        before = own.get("forward"), self._call
        self.beneath, self._call, self.active = before[0], (call, latent), True
        own["forward"] = self.forward
        return before

    def take_off(self, before: tuple[Any, Any]) -> None:
        """Put back what was there before `put_on`."""
        forward, self._call = before
        self.active = self._call is not None
        if forward is None:
            vars(self.target).pop("forward", None)
        else:
            vars(self.target)["forward"] = forward

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Return the block's output: on merged tokens, unless it or a patch of another node may need every token."""
        (call, latent), merging = self._call, self._merging
        try:
            options = kwargs.get("transformer_options") or next((value for value in args if type(value) is dict), {})
            grid = hosting.Grid(*merging.sides(latent, self.place.level, options))
        except Exception as error:
            if not hosting.is_ours(error):
                raise
            return self.original(*args, **kwargs)
        why = partial(merging.why_of_slot, options)
        return hosting.run_block(call, self.place, grid, self._below, self.original, args, kwargs, why)


def _options_of(path: str) -> tuple[tuple[str, int], int]:
    """Convert the path ``input_blocks.1.1.transformer_blocks.0`` to ``("input", 1), 0``. The middle block has 0.

    The results are "block" and "block_index" in the transformer_options of the path's attentions.
    """
    stage, number, *_, index = path.split(".")
    kind = stage.partition("_")[0]
    return (kind, 0 if kind == "middle" else int(number)), int(index)
