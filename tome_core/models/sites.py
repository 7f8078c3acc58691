"""The wraps of one model: around its forward, where a call begins, and around each self-attention of its picture.

While a compiler traces, each puts an operator of `compiled` into the graph, which asks it again when the graph runs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from ..attention.by_hand import ByHand, full_name, known_of
from ..attention.merged import Attention
from ..compiling import is_tracing
from ..engine.call import Call
from ..engine.state import State
from ..merging.grid import Grid
from ..merging.layout import Layout
from ..reporting.reasons import MASKED, OTHER_PARTS, REPLACED
from . import compiled, intercept
from .arguments import named, pack, unpack
from .compiled import NumberedSite
from .foreign_wrappers import is_own
from .intercept import MORE, Asked, Watching, answering, way_of

_MASKS = ("mask", "attention_mask", "attn_mask")
_CONTEXTS = ("encoder_hidden_states", "context")
_NOT_ATTENTION = "the function that it calls is no attention"
_MIXED = (
    "gradient checkpointing runs a merged call again, and calls with different rules or draws were made since the last "
    "backward pass, so nobody knows which: call backward() after each call of the model, or turn checkpointing off"
)


class ModelCall:
    """The call of a model that goes on in a thread.

    tokens: of a transformer, the picture's grid and how many tokens are the picture's kind, or why there is no grid.
    grid: of the part of a UNet that runs now. area: height and width of the latent. reached: attentions called so far.
    """

    def __init__(self, state: State, call: Call, latent: Any, tokens: Any = None) -> None:
        self.state, self.call, self.tokens = state, call, tokens
        self.grid: Grid | None = None
        self.area = tuple(latent.shape[-2:]) if torch.is_tensor(latent) and latent.dim() >= 4 else None
        self.reached = 0


class Calls(threading.local):
    """Of one model, in each thread. in_graph: the latest that a graph has begun; off: nothing is to merge; block: the
    block of a UNet that runs on merged tokens, see `unet_parts`.
    """

    now: ModelCall | None = None
    in_graph: ModelCall | None = None
    block: Any = None
    off = 0


class Shared:
    """What all wraps of one model share. state: of the patch in force, if any.

    begun: while a compiler traces the model's own call, what `compiled.attend` takes, or why it is left alone.
    """

    def __init__(self, adapter: Any) -> None:
        self.adapter = adapter
        self.state: State | None = None
        self.begun: torch.Tensor | str | None = None
        self.calls = Calls()
        self.root: ModelSite | None = None
        self.put_back: Callable[[], None] | None = None  # all wraps
        self._graded: ModelCall | None = None  # the latest that a backward pass may follow
        self._is_mixed = self._is_recomputing = False

    def remember(self, now: ModelCall) -> None:
        """A call has ended that a backward pass may follow."""
        before = self._graded
        if self._is_recomputing or before is None:
            self._is_mixed = self._is_recomputing = False
        elif not _same(before, now):
            self._is_mixed = True
        self._graded = now

    def recomputed(self) -> ModelCall | None:
        """The call that gradient checkpointing runs again. Raises RuntimeError if that may be another one."""
        if self._graded is None or torch._C._current_graph_task_id() == -1:
            return None
        if self._is_mixed:
            raise RuntimeError(_MIXED)
        self._is_recomputing = True
        return self._graded

    def look_after_itself(self, level: int) -> None:
        """An attention runs outside of any call: perhaps another program has taken the model's wrap off, as DeepCache
        does when it goes. It is put back then, for the next call.
        """
        root, state = self.root, self.state
        if state is not None and not self.calls.off and root is not None and not root.is_on_top():
            self.put_back()
            state.leave_alone(None, level, "another program had taken the patch off the model; it is on again", 0, 0, 0)

    def forget(self) -> None:
        """No patch is in force any more."""
        self.state, self._graded, self._is_mixed = None, None, False


def _same(one: ModelCall, other: ModelCall) -> bool:
    """Do two calls merge alike, given the same tokens?"""
    if one.call.rules != other.call.rules or one.area != other.area:
        return False
    draws = any(rule and rule.use_rand for level in one.call.rules for rule in level)
    return not draws or str(one.call.stamp) == str(other.call.stamp)


class ModelSite(NumberedSite):
    """Around a model's forward: begins a call, from the arguments that tell its time and its latent."""

    def __init__(self, model: nn.Module, shared: Shared) -> None:
        super().__init__(model)
        self.shared = shared
        shared.root = self

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """What the model gives."""
        shared, state = self.shared, self.shared.state
        if is_tracing():
            return self.original(*args, **kwargs) if state is None else self._trace(state, args, kwargs)
        calls = shared.calls
        before, now = calls.now, None
        if state is not None and not calls.off:
            now = self._open(state, shared.adapter.arguments(self.target, args, kwargs))
        calls.now = now
        try:
            out = self.original(*args, **kwargs)
        finally:
            calls.now = before
        if now is not None:
            if now.reached == 0:
                self._note_nothing_reached(now)
            if torch.is_grad_enabled():
                shared.remember(now)
        return out

    def begins(self, form: str, tensors: list[torch.Tensor], numbers: list[int]) -> None:
        """A call of the model, compiled as a whole, begins; its graph says so, with what the adapter reads."""
        shared, calls = self.shared, self.shared.calls
        calls.in_graph = None
        if shared.state is not None and not calls.off:
            given = dict(zip(shared.adapter.reads, unpack(form, tensors, numbers), strict=True))
            calls.in_graph = self._open(shared.state, given)

    def _open(self, state: State, given: Mapping[str, Any]) -> ModelCall:
        timestep, latent, tokens = self.shared.adapter.read(self.target, given, state.time)
        return ModelCall(state, state.begin(timestep, latent), latent, tokens)

    def _note_nothing_reached(self, now: ModelCall) -> None:
        call = now.call
        for level, rules in enumerate(call.rules):
            if rules.attn is not None:
                now.state.leave_alone(call, level, f"no attention was called: {REPLACED}", 0, 0, 0)

    def _trace(self, state: State, args: tuple, kwargs: Mapping[str, Any]) -> Any:
        """The same in a graph that is being made."""
        shared = self.shared
        begun = compiled.why_not_in_graph(state)
        if begun is None:
            packed = pack(shared.adapter.pick(self.target, args, kwargs))
            begun = compiled.begin(self.number, *packed) if packed else "a compiled call cannot be told such arguments"
        before, shared.begun = shared.begun, begun
        try:
            return self.original(*args, **kwargs)
        finally:
            shared.begun = before


class AttentionSite(NumberedSite):
    """Around a self-attention over the picture's tokens.

    path: its name in the model. level: of its tokens, from the finest. halvings: of the latent, on the way to it.
    """

    def __init__(self, module: nn.Module, path: str, level: int, shared: Shared, halvings: int = 0) -> None:
        super().__init__(module)
        self.path, self.level, self.shared, self.halvings = path, level, shared, halvings
        self.grids: dict[int, Grid] = {}  # by tokens, of calls that a backward pass may follow

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """What the attention gives."""
        if is_tracing():
            return self._trace(args, kwargs)
        now = self.shared.calls.now
        if now is None:
            now = self.shared.recomputed()
            if now is None:
                self.shared.look_after_itself(self.level)
                return self.original(*args, **kwargs)
        now.reached += 1
        call = now.call
        if call.rules[self.level].attn is None:
            why = call.why_off[self.level] if not any(call.rules[self.level]) else OTHER_PARTS
            self._leave_alone(now, why, args, kwargs)
            return self.original(*args, **kwargs)
        return self._merge(now, args, kwargs)

    def answers(
        self, whole: bool, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, by_head: bool,
        scale: float | None, gqa: bool, backend: str,
    ) -> torch.Tensor:  # fmt: skip
        """What a compiled graph asks for in its call, ``[B, S, H, d]``. whole: is the model's own call in the graph?"""
        calls = self.shared.calls
        now = calls.in_graph if whole else calls.now
        q, k, v = (one.transpose(1, 2) for one in (q, k, v)) if by_head else (q, k, v)
        more = {"backend": backend} if backend else {}
        before = answering(None if now is None else self._answer(now, []))
        try:
            again = way_of(self.target).code.again
            out = again(q, k, v, attn_mask=mask, scale=scale, enable_gqa=gqa, **more)
            return out.transpose(1, 2) if by_head else out
        finally:
            answering(before)

    def _merge(self, now: ModelCall, args: tuple, kwargs: dict[str, Any]) -> Any:
        target = self.target
        own = self.beneath is None or is_own(target, self.beneath)
        by_hand = self._description() if own else None
        if by_hand is not None:
            return self._merge_by_hand(by_hand, now, args, kwargs)
        way = way_of(target) if own else None
        asked: list[Asked] = []
        before = answering(self._answer(now, asked))
        try:
            if way is not None:
                out = way.run(target, *args, **kwargs)
            else:
                with Watching():
                    out = self.original(*args, **kwargs)
        finally:
            answering(before)
        if not asked:
            self._leave_alone(now, f"{self._what_computes()} calls no attention function that is known", args, kwargs)
        return out

    def _answer(self, now: ModelCall, seen: list[Asked]) -> Callable[[Asked], torch.Tensor]:
        """Answers what the attention asks of its function. seen: what it has asked, filled in."""
        heads = getattr(self.target, "heads", 1)
        return partial(answer, now.state, now.call, self.path, self.level, heads, partial(self.layout, now), seen)

    def _merge_by_hand(self, known: ByHand, now: ModelCall, args: tuple, kwargs: dict[str, Any]) -> Any:
        """An attention without a function: its projections' results, and its own code on a stand-in."""
        target, heads = self.target, self.target.heads
        x, why = args[0] if args else named(kwargs, ("hidden_states", "x")), ""
        context = args[1] if len(args) > 1 else named(kwargs, _CONTEXTS)
        source = x if context is None else context
        value = kwargs.get("value")
        value = source if value is None else value
        if not (torch.is_tensor(x) and torch.is_tensor(source) and x.dim() == source.dim() == value.dim() == 3):
            why = "called in an unknown way"
        elif source.shape[1] != x.shape[1] or value.shape[1] != x.shape[1]:
            return self.original(*args, **kwargs)
        elif any(kwargs.get(name) is not None for name in _MASKS):
            why = MASKED
        else:
            why = known.problem(target, kwargs) or ""
            layout = self.layout(now, x.shape[1])
            why = why or (layout if isinstance(layout, str) else "")
        if why:
            self._leave_alone(now, why, args, kwargs)
            return self.original(*args, **kwargs)

        def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            flat = (one.flatten(2) for one in (q, k, v))
            out = known.attend(target, *flat, None if bias is None else bias[:, 0], kwargs)
            return out.unflatten(2, (heads, -1))

        made = target.to_q(x), *known.keys_and_values(target, source, value, kwargs)
        q, k, v = (one.unflatten(2, (heads, -1)) for one in made)
        attention = Attention(q, k, v, function, known.scale(target, q.shape[3]), known.takes_bias(target))
        out = now.state.attend(now.call, self.path, self.level, layout, attention)
        return self.original(*args, **kwargs) if out is None else known.finish(target, out.flatten(2))

    def layout(self, now: ModelCall, tokens: int) -> Layout | str:
        """Where the picture's tokens lie among so many; a sentence if that is not known."""
        found = self.shared.adapter.layout_of(now, self, tokens)
        if isinstance(found, Layout) and torch.is_grad_enabled():
            self.grids[tokens] = found.grid
        return found

    def _description(self) -> ByHand | None:
        processor = getattr(self.target, "processor", None)
        known = known_of(type(self.target).forward)
        return known_of(type(processor).__call__) if known is None and processor is not None else known

    def _what_computes(self) -> str:
        """The function in the attention's place, in a reason."""
        processor = getattr(self.target, "processor", None)
        method = self.beneath
        if method is None:
            method = type(self.target).forward if processor is None else type(processor).__call__
        return full_name(getattr(method, "__func__", method))

    def _leave_alone(self, now: ModelCall, why: str, args: tuple, kwargs: Mapping[str, Any]) -> None:
        x = next((one for one in (*args, *kwargs.values()) if torch.is_tensor(one) and one.dim() > 1), None)
        batch, tokens = (0, 0) if x is None else x.shape[:2]
        now.state.leave_alone(now.call, self.level, why, batch, tokens, tokens)

    def _trace(self, args: tuple, kwargs: Mapping[str, Any]) -> Any:
        """The attention in a graph that is being made."""
        state, begun = self.shared.state, self.shared.begun
        if state is None:
            return self.original(*args, **kwargs)
        why = compiled.why_not_in_graph(state) if begun is None else begun
        function, processor = (None, None)
        if self.beneath is None:
            current = getattr(self.target, "processor", None)
            function = intercept.traced_function(type(self.target))
            processor = None if function is not None else intercept.traced_processor(type(current))
        if not isinstance(why, str) and function is None and processor is None:
            why = "its function is not known in a compiled model"
        if isinstance(why, str):
            state.ledger.note_traced(self.level, why)
            return self.original(*args, **kwargs)
        before = answering(partial(self._ask, state, self.number if begun is None else begun))
        try:
            if function is not None:
                return function(self.target, *args, **kwargs)
            stand_in = intercept.TracedAttention(self.target, processor(current))
            return self._of_class(stand_in, *args, **kwargs)
        finally:
            answering(before)

    def _ask(self, state: State, begun: torch.Tensor, asked: Asked) -> torch.Tensor:
        if not asked.plain:
            state.ledger.note_traced(self.level, MORE)
            return asked.unmerged()
        return compiled.attend(begun, self.number, asked)


def answer(
    state: State, call: Call, name: Hashable, level: int, heads: int, layout_of: Callable[[int], Layout | str],
    seen: list[Asked], asked: Asked,
) -> torch.Tensor:  # fmt: skip
    """What an attention function would have given, in its host's form.

    Args:
        state, call, name, level: as of `State.attend`.
        heads: of the attention, if they lie within the batch.
        layout_of: where the picture's tokens lie among so many, or why that is not known.
        seen: the call is added to it.
        asked: the call.
    """
    seen.append(asked)
    if asked.is_flat:
        asked.split(heads)
    q, k, mask, rows, why = asked.q, asked.k, asked.mask, None, ""
    if k.shape[1] != q.shape[1]:  # to a prompt, or to a picture that an adapter has brought
        return asked.unmerged()
    if mask is not None:
        rows = _rows_seen(mask, q)
        why, rows = (rows, None) if isinstance(rows, str) else ("", rows)
    layout = layout_of(q.shape[1] if rows is None else len(rows))
    why = why or (layout if isinstance(layout, str) else "" if asked.plain else MORE)
    takes_bias = None if why else asked.takes_bias()
    if takes_bias is None:
        state.leave_alone(call, level, why or _NOT_ATTENTION, q.shape[0], q.shape[1], k.shape[1])
        return asked.unmerged()
    attention = asked.attention(takes_bias)
    if rows is not None:
        attention = attention._replace(**{one: getattr(attention, one)[:, rows] for one in "qkv"})
    out = state.attend(call, name, level, layout, attention)
    if out is None:
        return asked.unmerged()
    return asked.give_back(out if rows is None else _spread(out, rows, q.shape[1]))


def _rows_seen(mask: torch.Tensor, q: torch.Tensor) -> torch.Tensor | str | None:
    """Which tokens a mask leaves, as indices; None for all of them. It waits for the device.

    Tokens that nobody sees are padding, whose own outputs nobody sees either.
    """
    if mask.dtype != torch.bool or mask.shape[-1] != q.shape[1] or mask.numel() != mask.shape[0] * mask.shape[-1]:
        return MASKED
    rows = mask.reshape(mask.shape[0], -1)
    if rows.all():
        return None
    return rows[0].nonzero()[:, 0] if (rows == rows[:1]).all() else "a mask hides other tokens in each picture"


def _spread(out: torch.Tensor, rows: torch.Tensor, tokens: int) -> torch.Tensor:
    """With zeros for the tokens that were left out."""
    whole = out.new_zeros(out.shape[0], tokens, *out.shape[2:])
    whole[:, rows] = out
    return whole
