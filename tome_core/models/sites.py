"""The wraps of one model: around its forward, where a call begins, and around each self-attention of its picture.

While a compiler traces, each puts an operator of `compiled` into the graph, which asks it again when the graph runs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from ..attention.by_hand import OF_PROCESSORS, ByHand, full_name, known_of
from ..attention.merged import Attention
from ..compiling import is_tracing
from ..engine.decision import Call
from ..engine.state import State
from ..merging.grid import Grid
from ..merging.layout import Layout
from ..reporting.reasons import MASKED, OF_OTHERS, OTHER_PARTS, REPLACED
from . import compiled, intercept
from .arguments import named, pack, tensors_in, unpack
from .compiled import NumberedSite
from .foreign_wrappers import is_own
from .intercept import MORE, Asked, Watching, Way, answer, way_of
from .wrap import Wrap

_MASKS = ("mask", "attention_mask", "attn_mask")
_CONTEXTS = ("encoder_hidden_states", "context")
_OF_ANOTHER_PATCH = (
    "gradient checkpointing runs a call again that was merged by another patch: call backward() before a patch is "
    "put on or taken off, or turn checkpointing off"
)


class ModelCall:
    """The call of a model that goes on in a thread.

    tokens: of a transformer, the picture's grid and how many tokens are the picture's kind, or why there is no grid.
    grid, layout: of the part of a UNet that runs now; grids: of each level that has run. area: height and width of the
    latent. reached: how many attentions were called so far.
    """

    def __init__(self, state: State, call: Call, latent: Any, tokens: Any = None) -> None:
        self.state, self.call, self.tokens = state, call, tokens
        self.grid: Grid | None = None
        self.grids: dict[int, Grid] = {}
        self.layout: Layout | None = None
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
        self._goes_back: ModelCall | None = None  # whose backward pass goes on

    def follow_back(self, now: ModelCall | None, out: Any) -> None:
        """A call has ended, None if it merged nothing. Its backward pass, which begins at its output, says whose it is,
        because gradient checkpointing runs blocks again there.
        """

        def note(_: torch.Tensor) -> None:
            self._goes_back = now
            torch.autograd.Variable._execution_engine.queue_callback(self._note_end)

        for one in tensors_in(out):
            if one.requires_grad:
                one.register_hook(note)

    def _note_end(self) -> None:
        self._goes_back = None

    def resumed(self) -> ModelCall | None:
        """The call of which a part runs by itself: a compiled one that is in several graphs, or one that gradient
        checkpointing runs again. Raises RuntimeError if another patch has merged that.
        """
        if torch.is_tensor(self.begun):
            return self.calls.in_graph
        now = self._goes_back
        if now is not None and now.state is not self.state:
            raise RuntimeError(_OF_ANOTHER_PATCH)
        return now

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
        self.state, self.root = None, None


class ModelSite(NumberedSite):
    """Around a model's forward: begins a call, from the arguments that tell its time and its latent."""

    def __init__(self, model: nn.Module, shared: Shared) -> None:
        super().__init__(model)
        self.shared = shared

    def install(self) -> Wrap:
        """As of every wrap."""
        self.shared.root = wrap = super().install()
        return wrap

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """What the model gives."""
        shared, state = self.shared, self.shared.state
        calls = shared.calls
        before, now = calls.now, None
        if state is not None and not calls.off:
            now = self._open(state, shared.adapter.arguments(self.target, args, kwargs))
        calls.now = now
        try:
            out = self.original(*args, **kwargs)
        finally:
            calls.now = before
        if now is not None and now.reached == 0:
            self._note_nothing_reached(now)
        if torch.is_grad_enabled():
            shared.follow_back(now, out)
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

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """The same in a graph that is being made."""
        shared, state = self.shared, self.shared.state
        if state is None:
            return self.original(*args, **kwargs)
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
    """Around a self-attention over the picture's tokens. merges_around: by tomesd's rules, too.

    path: its name in the model. level: of its tokens, from the finest. halvings: of the latent, on the way to it.
    """

    merges_around = False

    def __init__(self, module: nn.Module, path: str, level: int, shared: Shared, halvings: int = 0) -> None:
        super().__init__(module)
        self.path, self.level, self.shared, self.halvings = path, level, shared, halvings
        self._seen: tuple[Any, Any] | None = None  # forward, and class of processor, of which is known:
        self._way: Way | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the attention gives."""
        if not (isinstance(self, Wrap) and self.active) or (torch.compiler.is_compiling() and is_tracing()):
            return Wrap.forward(self, *args, **kwargs)
        now = self.shared.calls.now
        if now is None:
            now = self.shared.resumed()
            if now is None:
                self.shared.look_after_itself(self.level)
                return self.original(*args, **kwargs)
        now.reached += 1
        rules = now.call.rules[self.level]
        if rules.attn is None:
            self._leave_alone(now, OTHER_PARTS if any(rules) else now.call.why_off[self.level], args, kwargs)
            return self.original(*args, **kwargs)
        if self.beneath is not None or self.merges_around:
            return self._merge(now, args, kwargs)
        target = self.target
        processor, forward = getattr(target, "processor", None), type(target).forward
        kind = type(processor)
        if (forward, kind) != self._seen:
            known = _description(forward, kind)
            self._seen, self._way = (forward, kind), way_of(target) if known is None else None
        way = self._way
        if way is None:
            return self._merge(now, args, kwargs)
        asked: list[bool] = []
        before, intercept.now.answer = intercept.now.answer, partial(
            answer, now.state, now.call, self.path, self.level, getattr(target, "heads", 1),
            now.layout or partial(self.shared.adapter.layout_of, now, self), asked,
        )  # fmt: skip
        try:
            out = way.run(target, *args, **kwargs)
        finally:
            intercept.now.answer = before
        if not any(asked):
            self._note_unasked(now, bool(asked), args, kwargs)
        return out

    def answers(
        self, whole: bool, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, by_head: bool,
        scale: float | None, gqa: bool, backend: str,
    ) -> torch.Tensor:  # fmt: skip
        """What a compiled graph asks for in its call, ``[B, S, H, d]``. whole: is the model's own call in the graph?"""
        calls = self.shared.calls
        now = calls.in_graph if whole else calls.now
        q, k, v = (one.transpose(1, 2) for one in (q, k, v)) if by_head else (q, k, v)
        more = {"backend": backend} if backend else {}
        if now is not None:
            now.reached += 1
        before, intercept.now.answer = intercept.now.answer, None if now is None else self._answer(now, [])
        try:
            again = way_of(self.target).code.again
            out = again(q, k, v, attn_mask=mask, scale=scale, enable_gqa=gqa, **more)
            return out.transpose(1, 2) if by_head else out
        finally:
            intercept.now.answer = before

    def _merge(self, now: ModelCall, args: tuple, kwargs: dict[str, Any]) -> Any:
        """An attention whose code calls no function that it names, or beneath another's wrapper."""
        target = self.target
        if self.beneath is None or is_own(target, self.beneath):
            by_hand = _description(type(target).forward, type(getattr(target, "processor", None)))
            if by_hand is not None:
                return self._merge_by_hand(by_hand, now, args, kwargs)
            way = way_of(target)
            run = None if way is None else partial(way.run, target)
        else:
            run = None
        asked: list[bool] = []
        before, intercept.now.answer = intercept.now.answer, self._answer(now, asked)
        try:
            if run is not None:
                out = run(*args, **kwargs)
            else:
                with Watching():
                    out = self.original(*args, **kwargs)
        finally:
            intercept.now.answer = before
        if not any(asked):
            self._note_unasked(now, bool(asked), args, kwargs)
        return out

    def _note_unasked(self, now: ModelCall, is_to_others: bool, args: tuple, kwargs: dict[str, Any]) -> None:
        processor, method = getattr(self.target, "processor", None), self.beneath
        if method is None:
            method = type(self.target).forward if processor is None else type(processor).__call__
        name = full_name(getattr(method, "__func__", method))
        why = OF_OTHERS if is_to_others else f"{name} calls no attention function that is known"
        self._leave_alone(now, why, args, kwargs)

    def _answer(self, now: ModelCall, seen: list[bool]) -> Callable[[Asked], torch.Tensor]:
        """Answers what the attention asks of its function. seen: as of `answer`."""
        heads, where = getattr(self.target, "heads", 1), partial(self.shared.adapter.layout_of, now, self)
        return partial(answer, now.state, now.call, self.path, self.level, heads, where, seen)

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
            why = OF_OTHERS
        elif any(kwargs.get(name) is not None for name in _MASKS):
            why = MASKED
        else:
            why = known.problem(target, kwargs) or ""
            layout = self.shared.adapter.layout_of(now, self, x.shape[1])
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
        if out is None:  # projections are not asked twice: they may have hooks
            out = function(q, k, v, None)
        return known.finish(target, out.flatten(2))

    def _leave_alone(self, now: ModelCall, why: str, args: tuple, kwargs: Mapping[str, Any]) -> None:
        x = next((one for one in (*args, *kwargs.values()) if torch.is_tensor(one) and one.dim() > 1), None)
        batch, tokens = (0, 0) if x is None else x.shape[:2]
        now.state.leave_alone(now.call, self.level, why, batch, tokens, tokens)

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """The attention in a graph that is being made."""
        state, begun = self.shared.state, self.shared.begun
        if state is None:
            return self.original(*args, **kwargs)
        why = compiled.why_not_in_graph(state) if begun is None else begun
        forward, processor = None, None
        if self.beneath is None:
            current = getattr(self.target, "processor", None)
            forward = intercept.traced_attention(type(self.target))
            processor = None if forward is not None else intercept.traced_processor(type(current))
        if not isinstance(why, str) and forward is None and processor is None:
            why = "its function is not known in a compiled model"
        if isinstance(why, str):
            state.ledger.note_traced(self.level, why)
            return self.original(*args, **kwargs)
        ask = partial(self._ask, state, self.number if begun is None else begun)
        before, intercept.now.answer = intercept.now.answer, ask
        try:
            if forward is not None:
                return forward(self.target)(*args, **kwargs)
            stand_in = intercept.TracedAttention(self.target, processor(current))
            return self._of_class(stand_in, *args, **kwargs)
        finally:
            intercept.now.answer = before

    def _ask(self, state: State, begun: torch.Tensor, asked: Asked) -> torch.Tensor:
        if not asked.plain:
            state.ledger.note_traced(self.level, MORE)
            return asked.unmerged()
        return compiled.attend(begun, self.number, asked)


def _description(forward: Any, processor: type) -> ByHand | None:
    """Of an attention that computes by hand; None for every other."""
    known = known_of(forward)
    return known_of(processor.__call__) if known is None and full_name(forward) == OF_PROCESSORS else known
