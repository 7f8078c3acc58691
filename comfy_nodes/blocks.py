"""Blocks that run on merged tokens while a call of a branch runs, and other nodes' attention in them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from . import slot_calls, slot_function
from .host import hosting

hosting.register_package("comfy")  # ComfyUI's own blocks, attentions and LoRA layers act on each token alone
_UNTRIED = "another node's attention could not be tried on tokens in another order"


class Block(hosting.Wrap):
    """The replacement of a block's ``forward`` while a call of the branch runs. Subclasses have `merge`.

    Args:
        block: the block.
        place: the engine's `Place` of it.
        others: how other nodes' functions in the slot treat tokens.
    """

    def __init__(self, block: torch.nn.Module, place: Any, others: "OtherNodesAttention") -> None:
        super().__init__(block)
        self.place, self.others, self.below = place, others, hosting.ModulesBelow(block)
        self._call: tuple[Any, torch.Tensor] | None = None  # the call's record and its latent

    def merge(self, call: Any, latent: torch.Tensor, options: dict[str, Any], args: tuple, kwargs: dict) -> Any:
        """Return the block's output for arguments, in a `call` of `State.begin` with these transformer_options."""
        raise NotImplementedError

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
        try:
            options = kwargs.get("transformer_options") or next((value for value in args if type(value) is dict), {})
            return self.merge(*self._call, options, args, kwargs)
        except Exception as error:
            if not hosting.is_ours(error):
                raise
        return self.original(*args, **kwargs)


@contextmanager
def merging(blocks: Sequence[Block], call: Any, latent: torch.Tensor) -> Iterator[None]:
    """Replace blocks' forwards while a call runs, if a rule merges whole blocks."""
    on = []
    try:
        for block in blocks:
            if call.rules[block.place.level].block is not None:
                on.append((block, block.put_on(call, latent)))
        yield
    finally:
        for block, before in on:
            block.take_off(before)


class OtherNodesAttention:
    """What is known of other nodes' functions in the slot: whether they look at the order of tokens."""

    def __init__(self) -> None:
        self._whys: dict[tuple, str] = {}  # by the function and "is it self-attention"

    def note(self, attention: slot_calls.HostCall) -> None:
        """Note whether another node's function in the slot may need every token, by its first call of each kind."""
        kind = attention.override, attention.k.shape[:2] == attention.q.shape[:2]
        if slot_function.beneath() is None or kind in self._whys:
            return
        name, why = hosting.name_of_patch(attention.override), "was first called with a mask, so it was not tried"
        if attention.mask is None:
            try:
                why = "" if attention.treats_tokens_alike() else "looks at the order of tokens"
            except Exception as error:
                if not hosting.may_be_of_fewer_tokens(error):
                    raise
                why = "looks at the order of tokens"
        self._whys[kind] = why and f"another node's attention {why} ({name}); it merges without that"

    def why(self, options: dict[str, Any], kinds: tuple[bool, ...]) -> str:
        """Return why a block may need every token because of functions in the slot; "" if none is known.

        `kinds` are those of its attentions: True for self-attention, False for attention to other tokens.
        """
        there, beneath = options.get(slot_calls.SLOT), slot_function.beneath()
        if not slot_function.is_ours(there):
            name = hosting.name_of_patch(there)
            return f"another node's attention came into the call ({name}); it merges without that"
        whys = [self._whys.get((beneath, kind), _UNTRIED) for kind in kinds] if beneath else []
        return next(filter(None, whys), "")
