"""Whole blocks of transformers on merged tokens: which arguments of a block hold tokens, and the wrap around a block.

A transformer's block gets the picture's tokens, alone or in one sequence with the text's, and maybe the rotary
positions of all of them. The tokens of each cell merge (`merging.pooling`), with their positions; text, times and
modulations pass as they are. A block of which this does not tell all keeps all tokens.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..engine.decision import ModelCall
from ..engine.fewer_tokens import Merge, Place, around
from ..engine.state import foreign_mode
from ..faults import is_ours
from ..merging.grid import Layout
from ..reporting.ledger import MASKED, PARTS_COMPILED, Reason
from .every_token import TRAINS, ModulesBelow, why_of_options
from .outer_wrap import CODE, OuterWrap
from .wrap_set import WrapSet

# names of a block's arguments: its tokens, those of the text if they are apart, rotary positions, and masks of keys
TOKENS = ("hidden_states", "img", "x")
_TEXTS = ("encoder_hidden_states", "txt", "context")
_POSITIONS = ("image_rotary_emb", "rotary_emb", "freqs_cis", "pe", "freqs")
_MASKS = ("attention_mask", "attn_mask", "mask", "hidden_states_masks")
# arguments of the whole picture, whose last axis is of channels, however long it is
_OF_PICTURE = re.compile(r"(temb|vec|emb|c$|e$|adaln|modulation|conditioning|timestep|time_)")
_OF_TEXT = ("context_img_len",)  # Wan's number of tokens of a picture among those of the text
_NAMES = {"JointBlock": ["context", "x"]}  # of classes that hand all arguments on, in Stability's code of SD3
# shares of a model's blocks that keep all tokens: the first make sense of noise, the last draw the detail
WHOLE_FIRST, WHOLE_LAST = 1 / 3, 1 / 8
_MAY_NEED = "may need every token; it merges without that"
_NO_TOKENS = Reason("no argument of the block is known to be its tokens")


class TransformerBlockSite(OuterWrap):
    """The wrap around a block of a transformer that may run on merged tokens; `path` is its name in the model."""

    def __init__(self, block: nn.Module, wraps: WrapSet, path: str) -> None:
        super().__init__(block, "forward")
        self.wraps, self.place = wraps, Place(path, 0, "block", "blocks", pools=True)
        self.below = ModulesBelow(block)
        self._names = names_of(block)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Return the block's output: inside a call of the model whose rules merge blocks, by `run_pooled`."""
        call, original = self.wraps.calls.current, self.call_code if self.name == CODE else self.original
        if call is None or call.rules[0].block is None:
            return original(*args, **kwargs)
        layout_of = partial(self.wraps.adapter.layout_of, call, self)
        return run_pooled(call, self.place, layout_of, self.below, original, self._names, args, kwargs)

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """Call the block unmerged while a compiler traces, return its output, and note this for the report."""
        if self.wraps.patch is not None:
            self.wraps.patch.ledger.note_traced(0, PARTS_COMPILED)
        return self.original(*args, **kwargs)


def middle(blocks: Sequence[Any], first: float = WHOLE_FIRST, last: float = WHOLE_LAST) -> Sequence[Any]:
    """Return the blocks of a transformer that may run on merged tokens: all but shares of the first and last ones."""
    return blocks[math.ceil(first * len(blocks)) : len(blocks) - math.ceil(last * len(blocks))]


def names_of(block: nn.Module) -> list[str]:
    """Return the names of the arguments that a block takes by place."""
    parameters = inspect.signature(type(block).forward).parameters.values()
    names = [one.name for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD][1:]
    return names or _NAMES.get(type(block).__name__, [])


def run_pooled(
    call: ModelCall, place: Place, layout_of: Callable[[int], Layout | Reason], below: ModulesBelow, original: Callable,
    names: Sequence[str], args: tuple, kwargs: dict[str, Any], why_more: Callable[[], str] = str,
) -> Any:  # fmt: skip
    """Return a block's output, ``original(*args, **kwargs)``, by `around`: on merged tokens if nothing forbids it.

    Args:
        call: the record of the model's call.
        place: the block's, which pools.
        layout_of: takes a number of tokens, the block's or those with the text's; returns the picture's place in them,
            or why it is unknown.
        below: asks the block's modules.
        original: runs the block, and returns tokens, or a tuple with them.
        names: `names_of` the block.
        args: of its call; those without a name are ignored by the block.
        kwargs: of its call.
        why_more: returns a host's own reason why the block may need every token, "" for none.
    """
    by_place = dict(zip(names, args, strict=False))
    block, answer, number = _Block({**by_place, **kwargs}, layout_of), None, None

    def run(merge: Merge | None) -> Any:
        nonlocal answer, number
        answer = None
        if merge is None:
            return original(*args, **kwargs)
        now = block.merged(merge, call.positions)
        answer = original(*map(now.get, by_place), *args[len(by_place) :], **{name: now[name] for name in kwargs})
        if torch.is_tensor(answer):
            return answer
        number = _number_in(answer, now[block.name].shape)
        return None if number is None else answer[number]

    def why_whole() -> str:
        if call.has_gradients:
            return TRAINS
        now = foreign_mode() if torch._C._len_torch_function_stack() else ""
        return now or block.why() or why_more() or below.why()

    try:
        out = around(call, place, block.x, block.layout, run, why_whole)
    except Exception as error:
        if not is_ours(error):
            raise
        return original(*args, **kwargs)
    if answer is None or torch.is_tensor(answer):
        return out
    return type(answer)([*answer[:number], out, *answer[number + 1 :]])


class _Block:
    """The arguments of a call of a block, by name: which of them hold the picture's tokens."""

    def __init__(self, given: dict[str, Any], layout_of: Callable[[int], Layout | Reason]) -> None:
        self.given, self._first, self._tokens, self._all = given, 0, 0, 0
        self.layout: Layout | Reason = _NO_TOKENS
        self.name = next((name for name in TOKENS if torch.is_tensor(given.get(name)) and given[name].dim() == 3), "")
        self.x = given.get(self.name)
        if not self.name:
            return
        self._tokens = self._all = self.x.shape[1]
        text = next((given[name] for name in _TEXTS if torch.is_tensor(given.get(name))), None)
        self.layout = layout_of(self._tokens)
        if text is not None and text.dim() == 3 and not isinstance(self.layout, Reason):
            of_both = layout_of(self._tokens + text.shape[1])  # positions may be those of text and picture
            if not isinstance(of_both, Reason):
                self._all, self._first = self._tokens + text.shape[1], of_both.first - self.layout.first

    def why(self) -> str:
        """Return the reason why some argument may need every token, "" if none does."""
        return next(filter(None, map(self._why_of, self.given, self.given.values())), "")

    def _why_of(self, name: str, value: Any) -> str:
        if value is None or isinstance(value, bool) or name in (self.name, *_TEXTS, *_OF_TEXT):
            return ""
        if name == "transformer_options":
            return why_of_options(value)
        if name in _POSITIONS:
            return "" if self._knows(value) else f"the form of its positions is not known ({name})"
        if name in _MASKS and torch.is_tensor(value):
            of_tokens = [side for side in value.shape if side in (self._tokens, self._all)]
            return "" if value.dtype == torch.bool and len(of_tokens) == 1 else MASKED
        parts = value if isinstance(value, (tuple, list)) else [value]
        if isinstance(value, dict) and not value:
            return ""
        for part in parts:
            last = 1 if _OF_PICTURE.match(name) else 0
            if not torch.is_tensor(part) or {self._tokens, self._all} & {*part.shape[1 : part.dim() - last]}:
                return f"an argument {_MAY_NEED} ({name})"
        return ""

    def _knows(self, positions: Any) -> bool:
        """Tell whether positions are a tensor, or several, of which one at least has an axis of tokens."""
        parts = positions if isinstance(positions, (tuple, list)) else [positions]
        return all(map(torch.is_tensor, parts)) and any(self._axis_of(part) is not None for part in parts)

    def _axis_of(self, part: Tensor) -> int | None:
        """Return the axis of tokens in positions or in a mask; None if it has none, as the text's positions."""
        sides = part.shape if part.dtype == torch.bool else part.shape[:-1]
        return next((axis for axis, side in enumerate(sides) if side in (self._tokens, self._all)), None)

    def merged(self, merge: Merge, known: dict[tuple, tuple[Tensor, Tensor]]) -> dict[str, Any]:
        """Return the arguments with merged tokens, positions and masks.

        `merge` merges ``(1, tokens, channels)``. `known` has what was merged in this call of the model: all blocks get
        the same positions.
        """

        def once(part: Tensor) -> Tensor:
            key = id(part), self._tokens, self._first, self.layout
            if key not in known:
                known[key] = part, self._merged(part, merge)
            return known[key][1]

        given = {**self.given, self.name: merge(self.x)}
        for name in (*_POSITIONS, *_MASKS):
            value = given.get(name)
            if isinstance(value, (tuple, list)):
                given[name] = type(value)([once(part) for part in value])
            elif value is not None:
                given[name] = once(value)
        return given

    def _merged(self, part: Tensor, merge: Merge) -> Tensor:
        """Return positions or a mask for the merged tokens; those without an axis of tokens as they are."""
        axis = self._axis_of(part)
        if axis is None:
            return part
        first = self._first if part.shape[axis] == self._all else 0
        rows = part.movedim(axis, 0)
        own = rows[first : first + self._tokens]
        numbers = torch.view_as_real(own) if own.is_complex() else own
        means = merge(numbers.flatten(1)[None].to(numbers.dtype if numbers.is_floating_point() else torch.float32))[0]
        means = means.unflatten(1, numbers.shape[1:]) if numbers.dim() > 1 else means[:, 0]
        if own.is_complex():
            means = torch.view_as_complex(means.contiguous())
        elif own.dtype == torch.bool:  # a group is a key if all of its tokens are
            means = means == 1
        return torch.cat([rows[:first], means, rows[first + self._tokens :]]).movedim(0, axis)


def _number_in(answer: Any, shape: torch.Size) -> int | None:
    """Return the place of the tokens in a block's output, a tuple, by their shape; None if there are none, or two."""
    several = enumerate(answer) if isinstance(answer, (tuple, list)) else ()
    numbers = [number for number, value in several if torch.is_tensor(value) and value.shape == shape]
    return numbers[0] if len(numbers) == 1 else None
