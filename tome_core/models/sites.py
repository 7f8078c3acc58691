"""The wraps of one model: around its forward, where a call begins, and around each self-attention of its picture; in a
UNet around each transformer as well, which tells the grid.

While a compiler traces, each puts an operator of `compiled` into the graph, which asks it again when the graph runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from ..attention.by_hand import OF_PROCESSORS, ByHand, full_name, known_of
from ..attention.merged import Attention
from ..compiling import is_tracing
from ..engine.decision import Call
from ..engine.state import State, foreign_mode
from ..merging.grid import Grid, Layout
from ..reporting.ledger import MASKED, OF_OTHERS, OTHER_PARTS, REPLACED, TAKEN_OFF
from . import compiled, intercept
from .asked import MORE, Asked, answer
from .compiled import NumberedSite, pack, unpack
from .intercept import Watching, Way, way_of
from .wrap import Wrap, WrapSet, calling, is_own, others_on, over_hook, why_passed

MASKS = ("mask", "attention_mask", "attn_mask")
CONTEXTS = ("encoder_hidden_states", "context")
LATENTS = ("x", "sample", "hidden_states")  # of a UNet, and what is inside
_UNTOLD = "a compiled call cannot be told such arguments"


class ModelSite(NumberedSite):
    """Around a model's forward: begins a call, from the arguments that tell its time and its latent."""

    def __init__(self, model: nn.Module, wraps: WrapSet) -> None:
        super().__init__(model)
        self.wraps = wraps

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """What the model gives."""
        wraps, calls = self.wraps, self.wraps.calls
        before, now, calls.passed = calls.now, None, ""
        if wraps.handle is not None and not calls.off:
            now = self._open(wraps.handle, wraps.adapter.pick(self.target, args, kwargs))
        calls.now = now
        try:
            out = self.original(*args, **kwargs)
        finally:
            calls.now = before
        if now is not None and not wraps.paths.issubset(now.reached):
            count_missed(wraps, now)
        if torch.is_grad_enabled():
            wraps.follow_back(now, out)
        return out

    def begins(self, form: str, tensors: list[torch.Tensor], numbers: list[int]) -> None:
        """A call of the model, compiled as a whole, begins; its graph says so, with what the adapter reads."""
        wraps, calls = self.wraps, self.wraps.calls
        calls.in_graph = None
        if wraps.handle is not None and not calls.off:
            calls.in_graph = self._open(wraps.handle, unpack(form, tensors, numbers))

    def _open(self, state: State, read: list[Any]) -> Call:
        adapter = self.wraps.adapter
        timestep, latent, facts = adapter.read(self.target, dict(zip(adapter.reads, read, strict=True)), state.time)
        call = state.begin(timestep, latent)
        call.facts = facts
        return call

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """The same in a graph that is being made."""
        wraps, state = self.wraps, self.wraps.handle
        if state is None:
            return self.original(*args, **kwargs)
        begun = compiled.why_not_in_graph(state)
        if begun is None:
            packed = pack(wraps.adapter.pick(self.target, args, kwargs))
            begun = compiled.begin(self.number, *packed) if packed else _UNTOLD
        before, wraps.begun = wraps.begun, begun
        try:
            return self.original(*args, **kwargs)
        finally:
            wraps.begun = before


class TransformerSite(Wrap):
    """Around a transformer of a UNet: reads the grid from its 4-D input, anew at each call.

    level: of its blocks; attentions: the names of those that have a wrap.
    """

    def __init__(self, transformer: nn.Module, wraps: WrapSet, level: int, attentions: set[str]) -> None:
        super().__init__(transformer)
        self.wraps, self.level, self.attentions = wraps, level, attentions

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The transformer's output, its attentions knowing the grid."""
        if not (isinstance(self, Wrap) and self.active) or (torch.compiler.is_compiling() and is_tracing()):
            return Wrap.forward(self, *args, **kwargs)
        now, x = self.wraps.calls.now, args[0] if args else named(kwargs, LATENTS)
        if now is None or not torch.is_tensor(x) or x.dim() != 4:
            return self.original(*args, **kwargs)
        now.layouts[self.level], reached = Layout(Grid(*x.shape[2:])), len(now.reached)
        if self.beneath is None:
            out = type(self.target).forward(self.target, *args, **kwargs)
        else:
            out = self.beneath(*args, **kwargs)
        missed = self.attentions - set(now.reached[reached:])
        if missed and (len(missed) < len(self.attentions) or self.beneath is None):
            count_missed(self.wraps, now, missed, x.shape[0], x.shape[2] * x.shape[3])
            now.reached += missed
        return out  # else another's wrapper gave what it had kept, as DeepCache's does: nothing ran


class AttentionSite(NumberedSite):
    """Around a self-attention over the picture's tokens.

    path: its name in the model. level: of its tokens, from the finest. halvings: of the latent, on the way to it.
    """

    def __init__(self, module: nn.Module, wraps: WrapSet, path: str, level: int, halvings: int = 0) -> None:
        super().__init__(module)
        self.wraps, self.path, self.level, self.halvings = wraps, path, level, halvings
        self._seen: tuple[Any, Any] | None = None  # forward, and class of processor, of which is known:
        self._way: Way | ByHand | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the attention gives."""
        if not (isinstance(self, Wrap) and self.active) or (torch.compiler.is_compiling() and is_tracing()):
            return Wrap.forward(self, *args, **kwargs)
        now = self.wraps.calls.now or self.wraps.resumed()
        if now is None:
            self.wraps.look_after_itself(self.level)
            return self.original(*args, **kwargs)
        now.reached.append(self.path)
        rules = now.rules[self.level]
        if rules.attn is not None:
            return self._merge(now, args, kwargs)
        self._leave_alone(now, OTHER_PARTS if any(rules) else now.why_off[self.level], args, kwargs)
        return self.original(*args, **kwargs)

    def _merge(self, now: Call, args: tuple, kwargs: dict[str, Any]) -> Any:
        """By the function that its code calls, by its own code on a stand-in, or, if another's wrapper lies beneath or
        no name leads to a function, by watching torch's.
        """
        target, way, seen = self.target, None, []
        processor, forward = type(getattr(target, "processor", None)), type(target).forward
        if self.beneath is None or is_own(target, self.beneath):
            if (forward, processor) != self._seen:
                by_hand = known_of(processor.__call__ if full_name(forward) == OF_PROCESSORS else forward)
                self._seen, self._way = (forward, processor), by_hand or way_of(target)
            way = self._way
            if isinstance(way, ByHand):
                return self._merge_by_hand(way, now, args, kwargs)
        before, intercept.now.answer = intercept.now.answer, self._answer(now, seen)
        try:
            if way is not None:
                out = way.run(target, *args, **kwargs)
            else:
                with Watching():
                    out = self.original(*args, **kwargs)
        finally:
            intercept.now.answer = before
        if not any(seen):
            # a processor whose scores are known is not what is unknown
            method = forward if processor is type(None) or known_of(processor.__call__) else processor.__call__
            method = method if self.beneath is None else getattr(self.beneath, "__func__", self.beneath)
            why = OF_OTHERS if seen else f"{full_name(method)} calls no attention function that is known"
            self._leave_alone(now, why, args, kwargs)
        return out

    def _answer(self, now: Call, seen: list[bool]) -> Callable[[Asked], torch.Tensor]:
        """Answers what the attention asks of its function. seen: as of `answer`."""
        where = now.layouts.get(self.level) or partial(self.wraps.adapter.layout_of, now, self)
        heads = getattr(self.target, "heads", 1)
        return partial(answer, now.state, now, self.path, self.level, heads, where, seen)

    def answers(
        self, whole: bool, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, by_head: bool,
        scale: float | None, gqa: bool, backend: str,
    ) -> torch.Tensor:  # fmt: skip
        """What a compiled graph asks for in its call, ``[B, S, H, d]``. whole: is the model's own call in the graph?"""
        calls = self.wraps.calls
        now = calls.in_graph if whole else calls.now
        q, k, v = (one.transpose(1, 2) for one in (q, k, v)) if by_head else (q, k, v)
        more = {"backend": backend} if backend else {}
        if now is not None:
            now.reached.append(self.path)
        asked = way_of(self.target).again.read(q, k, v, attn_mask=mask, scale=scale, enable_gqa=gqa, **more)
        out = asked.unmerged() if now is None else self._answer(now, [])(asked)
        return out.transpose(1, 2) if by_head else out

    def _merge_by_hand(self, known: ByHand, now: Call, args: tuple, kwargs: dict[str, Any]) -> Any:
        """An attention without a function: its projections' results, and its own code on a stand-in."""
        target, heads = self.target, self.target.heads
        x, why = args[0] if args else named(kwargs, ("hidden_states", "x")), ""
        context = args[1] if len(args) > 1 else named(kwargs, CONTEXTS)
        source = x if context is None else context
        value = kwargs.get("value")
        value = source if value is None else value
        if not (torch.is_tensor(x) and torch.is_tensor(source) and x.dim() == source.dim() == value.dim() == 3):
            why = "called in an unknown way"
        elif source.shape[1] != x.shape[1] or value.shape[1] != x.shape[1]:
            why = OF_OTHERS
        elif any(kwargs.get(name) is not None for name in MASKS):
            why = MASKED
        else:
            why = known.problem(target, kwargs) or ""
            layout = self.wraps.adapter.layout_of(now, self, x.shape[1])
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
        attention = Attention(q, k, v, function, known.scale(target, q.shape[3]), known.adds_bias)
        out = now.state.attend(now, self.path, self.level, layout, attention)
        if out is None:  # projections are not asked twice: they may have hooks
            out = function(q, k, v, None)
        return known.finish(target, out.flatten(2))

    def _leave_alone(self, now: Call, why: str, args: tuple, kwargs: Mapping[str, Any]) -> None:
        x = next((one for one in (*args, *kwargs.values()) if torch.is_tensor(one) and one.dim() > 1), None)
        batch, tokens = (0, 0) if x is None else x.shape[:2]
        now.state.leave_alone(self.level, why, batch, tokens, tokens)

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """The attention in a graph that is being made."""
        state, begun = self.wraps.handle, self.wraps.begun
        if state is None:
            return self.original(*args, **kwargs)
        why = compiled.why_not_in_graph(state) if begun is None else begun
        if not isinstance(why, str) and torch._C._len_torch_function_stack():
            why = foreign_mode() or why
        forward, processor = None, None
        if self.beneath is None:
            current = getattr(self.target, "processor", None)
            forward = intercept.traced(type(self.target), "forward")
            processor = None if forward is not None else intercept.traced(type(current), "__call__")
        if not isinstance(why, str) and forward is None and processor is None:
            why = "its function is not known in a compiled model"
        if isinstance(why, str):
            state.ledger.note_traced(self.level, why)
            return self.original(*args, **kwargs)
        before, intercept.now.answer = intercept.now.answer, partial(self._ask, self.number if begun is None else begun)
        try:
            if forward is not None:
                return forward(self.target)(*args, **kwargs)
            # who asks which arguments a processor takes: a compiler cannot tell of a function that is made here
            stand_in = processor(current, __call__=current.__call__)
            like = intercept.Like(self.target, processor=stand_in)
            return calling(type(self.target), "forward")()(like, *args, **kwargs)
        finally:
            intercept.now.answer = before

    def _ask(self, begun: torch.Tensor, asked: Asked) -> torch.Tensor:
        if not asked.plain:
            self.wraps.handle.ledger.note_traced(self.level, MORE)
            return asked.unmerged()
        more = asked.mask, asked.by_head, asked.scale, asked.gqa, asked.backend
        return asked.give_back(compiled.OPERATORS["attend"](begun, self.number, asked.q, asked.k, asked.v, *more))


def count_missed(wraps: WrapSet, now: Call, names: set[str] | None = None, batch: int = 0, tokens: int = 0) -> None:
    """Count attentions that a call did not come to, by what stands in the place of each, of its block or, if it came to
    none, of the model. What was taken off is put back. names: those that it had to come to; None if it may pass some.
    """
    model, is_lost = wraps.on[0].target if wraps.on else None, False
    for site in (one for one in wraps.on if one.path):
        is_missed = site.path not in now.reached if names is None else site.path in names
        if not is_missed or now.rules[site.level].attn is None or now.state.ledger.levels[site.level].traced:
            continue
        block = model.get_submodule(site.path.rpartition(".")[0])
        places = [] if not site.is_on_top() else [block] if now.reached else [block, model]
        found = [full_name(one) for one in (over_hook(site.target), *map(others_on, places)) if one is not None]
        why = f"{REPLACED}: {found[0]}" if found else REPLACED if places else why_passed(site)
        if names is not None or why != REPLACED or not now.reached:
            now.state.leave_alone(site.level, why, batch, tokens, tokens)
        is_lost |= why == TAKEN_OFF
    if is_lost:
        wraps.put_back()


def named(kwargs: Mapping[str, Any], names: Sequence[str]) -> Any:
    """The first of these keywords that is there; None if there is none."""
    return next((kwargs[name] for name in names if name in kwargs), None)
