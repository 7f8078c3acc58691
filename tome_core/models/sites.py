"""The wraps that a patch puts on a model.

`ModelSite` wraps the forward of the model, in which a model call begins. `AttentionSite` wraps each self-attention over
the picture's tokens. In a UNet, `TransformerSite` wraps each transformer, whose input shows the token grid. While a
compiler traces, a wrap puts an operator of `compiled` into the graph. When the graph runs, the operator calls the wrap.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from ..attention.descriptions import OF_PROCESSORS, AttentionDescription, description_of, full_name
from ..attention.merged import Attention
from ..compiling import is_tracing
from ..engine.decision import ModelCall
from ..engine.state import State, foreign_mode
from ..faults import is_ours, quietly
from ..merging.grid import Grid, Layout
from ..reporting.ledger import ARGUMENTS, MASKED, OF_OTHERS, REPLACED, TAKEN_OFF, Reason
from . import compiled, intercept
from .answer import attend_call
from .attention_calls import MORE, AttentionCall
from .compiled import NumberedSite, pack, unpack
from .intercept import CodeReplacement, InterceptTorch, replacement_for
from .wrap import Wrap, calling, foreign_method_on, is_own, over_hook, why_missed
from .wrap_set import WrapSet

MASKS = ("mask", "attention_mask", "attn_mask")
CONTEXTS = ("encoder_hidden_states", "context")
LATENTS = ("x", "sample", "hidden_states")  # names of the first argument of a UNet, a transformer and a block
_UNSUPPORTED_ARGUMENTS = "a compiled model does not support these arguments"


class ModelSite(NumberedSite):
    """The wrap around a model's forward. It makes a `ModelCall` of a call's timestep and latent, if it may merge."""

    def __init__(self, model: nn.Module, wraps: WrapSet) -> None:
        super().__init__(model)
        self.wraps = wraps

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model and return its output; while the call runs, its record is in `Calls.current`.

        The record is None if no patch is in force or if this thread turned merging off. Attentions that a call did not
        reach are counted, see `count_missed`. If gradients are on, the backward pass is prepared too.
        """
        wraps, calls = self.wraps, self.wraps.calls
        before, call, calls.reason_missed = calls.current, None, ""
        quietly(wraps.follow_compilers)
        if wraps.patch is not None and not calls.disabled:
            try:
                call = self._begin_call(wraps.patch, wraps.adapter.pick(self.target, args, kwargs))
            except Exception as error:
                if not is_ours(error):
                    raise
        calls.current = call
        try:
            out = self.original(*args, **kwargs)
        finally:
            calls.current = before
        if call is not None and not wraps.paths.issubset(call.called_attentions):
            quietly(count_missed, wraps, call)
        if torch.is_grad_enabled():
            wraps.prepare_backward(call, out)
        return out

    def begin_in_graph(self, form: str, tensors: list[torch.Tensor], numbers: list[int]) -> None:
        """Begin a call for the operator ``begin``; put its record, None if it must not merge, in `Calls.in_graph`."""
        wraps, calls = self.wraps, self.wraps.calls
        calls.in_graph = None
        if wraps.patch is not None and not calls.disabled:
            calls.in_graph = self._begin_call(wraps.patch, unpack(form, tensors, numbers))

    def _begin_call(self, state: State, read: list[Any]) -> ModelCall:
        """Begin a call and return its record, for the caller to keep. `read` has the values of the adapter's `pick`."""
        adapter = self.wraps.adapter
        timestep, latent, facts = adapter.read(self.target, dict(zip(adapter.reads, read, strict=True)), state.time)
        call = state.begin(timestep, latent)
        call.facts = facts
        return call

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model while a compiler traces, with the operator ``begin`` in the graph if possible.

        Meanwhile `WrapSet.begun` holds the operator's result, or the reason why the call does not merge.
        """
        wraps, state = self.wraps, self.wraps.patch
        if state is None:
            return self.original(*args, **kwargs)
        begun = compiled.why_not_in_graph(state)
        if begun is None:
            packed = pack(wraps.adapter.pick(self.target, args, kwargs))
            begun = compiled.begin(self.number, *packed) if packed else _UNSUPPORTED_ARGUMENTS
        before, wraps.begun = wraps.begun, begun
        try:
            return self.original(*args, **kwargs)
        finally:
            wraps.begun = before


class TransformerSite(Wrap):
    """The wrap around a transformer of a UNet, which reads the token grid from the 4-D input at each call.

    `attentions` are the paths of the self-attentions in it that have a wrap; `level` is 0 for the finest tokens.
    """

    def __init__(self, transformer: nn.Module, wraps: WrapSet, level: int, attentions: set[str]) -> None:
        super().__init__(transformer)
        self.wraps, self.level, self.attentions = wraps, level, attentions

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the transformer and return its output; before, put its input's height and width in `ModelCall.layouts`.

        Attentions that the call did not reach are counted, unless another extension below may have returned a cached
        output.
        """
        if not (isinstance(self, Wrap) and self.active) or (torch.compiler.is_compiling() and is_tracing()):
            return Wrap.forward(self, *args, **kwargs)
        call, x = self.wraps.calls.current, args[0] if args else named(kwargs, LATENTS)
        if call is None or not torch.is_tensor(x) or x.dim() != 4:
            return self.original(*args, **kwargs)
        call.layouts[self.level], reached = Layout(Grid(*x.shape[2:])), len(call.called_attentions)
        if self.beneath is None:
            out = type(self.target).forward(self.target, *args, **kwargs)
        else:
            out = self.beneath(*args, **kwargs)
        missed = self.attentions - set(call.called_attentions[reached:])
        if missed and (len(missed) < len(self.attentions) or self.beneath is None):
            quietly(count_missed, self.wraps, call, missed, x.shape[0], x.shape[2] * x.shape[3])
            call.called_attentions += missed  # so that they are not counted again
        return out  # if no attention ran, another extension returned a cached output, as DeepCache does


class AttentionSite(NumberedSite):
    """The wrap around a self-attention over the picture's tokens.

    `path` is its name in the model; `level` is 0 for the finest tokens; `halvings` tells how often the latent is halved
    before it reaches an attention of a UNet, and is not used in transformers.
    """

    def __init__(self, module: nn.Module, wraps: WrapSet, path: str, level: int, halvings: int = 0) -> None:
        super().__init__(module)
        self.wraps, self.path, self.level, self.halvings = wraps, path, level, halvings
        # the replacement for this forward and this class of processors
        self._replacement_key: tuple[Any, Any] | None = None
        self._replacement: CodeReplacement | AttentionDescription | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the attention's output, with merged keys and values if the rule in force and the call allow it.

        In a recorded model call its path joins `ModelCall.called_attentions`, and it is counted.
        """
        if not (isinstance(self, Wrap) and self.active) or (torch.compiler.is_compiling() and is_tracing()):
            return Wrap.forward(self, *args, **kwargs)
        call = self.wraps.calls.current or self.wraps.call_outside_forward()
        try:
            if call is None:
                self.wraps.regain_top(self.level)
                return self.original(*args, **kwargs)
            call.called_attentions.append(self.path)
            if call.inside is not None:  # in a block that runs on merged tokens
                x = args[0] if args else kwargs.get("hidden_states")  # without a call of a function for each block
                text = kwargs.get("encoder_hidden_states")
                seen = 0 if x is None else x.shape[1] + (0 if text is None else text.shape[1])
                call.state.count_inside(call, self.level, seen)
            elif call.rules[self.level].attn is not None:
                return self._merge(call, args, kwargs)
            else:
                self._count_unmerged(call, call.why_not("attn", self.level), args, kwargs)
        except Exception as error:
            if not is_ours(error):
                raise
        return self.original(*args, **kwargs)

    def _merge(self, call: ModelCall, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Return the attention's output, merged by its `AttentionDescription`, or else by its `CodeReplacement`.

        Without either, and above another extension's wrapper (unless `is_own` sees through), torch's function is
        watched.
        """
        target, replacement, seen = self.target, None, []
        processor, forward = type(getattr(target, "processor", None)), type(target).forward
        if self.beneath is None or is_own(target, self.beneath):
            if (forward, processor) != self._replacement_key:
                by_hand = description_of(processor.__call__ if full_name(forward) == OF_PROCESSORS else forward)
                self._replacement_key, self._replacement = (forward, processor), by_hand or replacement_for(target)
            replacement = self._replacement
            if isinstance(replacement, AttentionDescription):
                return self._merge_by_description(replacement, call, args, kwargs)
        before, intercept.current.answer = intercept.current.answer, self._answer(call, seen)
        try:
            if replacement is not None:
                out = replacement.run(target, *args, **kwargs)
            else:
                with InterceptTorch():
                    out = self.original(*args, **kwargs)
        finally:
            intercept.current.answer = before
        if not any(seen):
            # name the part that is unknown: the forward if the processor is known, else the processor
            method = forward if processor is type(None) or description_of(processor.__call__) else processor.__call__
            method = method if self.beneath is None else getattr(self.beneath, "__func__", self.beneath)
            why = OF_OTHERS if seen else f"{full_name(method)} calls no attention function that is known"
            self._count_unmerged(call, why, args, kwargs)
        return out

    def _answer(self, call: ModelCall, seen: list[bool]) -> Callable[[AttentionCall], torch.Tensor]:
        """Return `attend_call` for this attention as a function of an `AttentionCall`, which appends to `seen`.

        That is True for self-attention, False for keys of other tokens.
        """
        layout = call.layouts.get(self.level) or partial(self.wraps.adapter.layout_of, call, self)
        heads = getattr(self.target, "heads", 1)
        return partial(attend_call, call.state, call, self.path, self.level, heads, layout, seen)

    def attend_in_graph(
        self, whole: bool, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, by_head: bool,
        scale: float | None, gqa: bool, backend: str,
    ) -> torch.Tensor:  # fmt: skip
        """Answer the attention for the operator ``attend`` of a compiled graph, unmerged if no call is on record.

        `whole` is True if the model's own call is in the graph: its record is `Calls.in_graph`, else `Calls.current`.
        The other arguments are an `AttentionCall`'s; the result has the form of the tensors.
        """
        calls = self.wraps.calls
        call = calls.in_graph if whole else calls.current
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v)) if by_head else (q, k, v)
        options = {"backend": backend} if backend else {}
        if call is not None:
            call.called_attentions.append(self.path)
        function = replacement_for(self.target).replaced_function
        attention_call = function.read(q, k, v, attn_mask=mask, scale=scale, enable_gqa=gqa, **options)
        if call is not None and call.inside is not None:  # in a block that runs on merged tokens
            call.state.count_inside(call, self.level, attention_call.q.shape[1])
            out = attention_call.unmerged()
        else:
            out = attention_call.unmerged() if call is None else self._answer_in_graph(call, attention_call)
        return out.transpose(1, 2) if by_head else out

    def _answer_in_graph(self, call: ModelCall, attention_call: AttentionCall) -> torch.Tensor:
        """Return the output of an attention of a compiled graph, in the host's form."""
        return self._answer(call, [])(attention_call)

    def _merge_by_description(self, known: AttentionDescription, call: ModelCall, args: tuple, kwargs: dict) -> Any:
        """Return the output, merged as `known` describes, of an attention that computes scores by hand."""
        target, heads = self.target, self.target.heads
        x, why = args[0] if args else named(kwargs, ("hidden_states", "x")), ""
        context = args[1] if len(args) > 1 else named(kwargs, CONTEXTS)
        source = x if context is None else context
        value = source if kwargs.get("value") is None else kwargs["value"]
        if not (torch.is_tensor(x) and torch.is_tensor(source) and x.dim() == source.dim() == value.dim() == 3):
            why = ARGUMENTS
        elif source.shape[1] != x.shape[1] or value.shape[1] != x.shape[1]:
            why = OF_OTHERS
        elif any(kwargs.get(name) is not None for name in MASKS):
            why = MASKED
        else:
            layout = self.wraps.adapter.layout_of(call, self, x.shape[1])
            why = known.problem(target, kwargs) or (layout if isinstance(layout, Reason) else "")
        if why:
            self._count_unmerged(call, why, args, kwargs)
            return self.original(*args, **kwargs)

        def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            flat = (tensor.flatten(2) for tensor in (q, k, v))
            out = known.attend(target, *flat, None if bias is None else bias[:, 0], kwargs)
            return out.unflatten(2, (heads, -1))

        projected = target.to_q(x), *known.keys_and_values(target, source, value, kwargs)
        q, k, v = (tensor.unflatten(2, (heads, -1)) for tensor in projected)
        attention = Attention(q, k, v, function, known.scale(target, q.shape[3]), known.adds_bias)
        out = call.state.attend(call, self.path, self.level, layout, attention)
        if out is None:  # reuse q, k and v: the projections must not run twice, because they may have hooks
            out = function(q, k, v, None)
        return known.finish(target, out.flatten(2))

    def _count_unmerged(self, call: ModelCall, why: str, args: tuple, kwargs: Mapping[str, Any]) -> None:
        """Count this attention as unmerged; its arguments' first tensor of 2 or more axes shows batch and tokens.

        A text that a transformer's attention gets beside them counts too.
        """
        arguments = (*args, *kwargs.values())
        x = next((value for value in arguments if torch.is_tensor(value) and value.dim() > 1), None)
        batch, tokens = (0, 0) if x is None else x.shape[:2]
        text = kwargs.get("encoder_hidden_states")
        if text is not None and text is not x and text.dim() == 3:
            tokens += text.shape[1]
        call.state.count_unmerged(self.level, why, batch, tokens)

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """Return the attention's output while a compiler traces, with the operator ``attend`` in the graph if possible.

        If not, the attention is compiled without merging, and the reason is noted for the report.
        """
        state, begun = self.wraps.patch, self.wraps.begun
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
        answer_in_graph = partial(self._call_operator, self.number if begun is None else begun)
        before, intercept.current.answer = intercept.current.answer, answer_in_graph
        try:
            if forward is not None:
                return forward(self.target)(*args, **kwargs)
            # Attention.forward inspects the signature of ``processor.__call__``. A compiler cannot inspect a function
            # that was made here, so the stand-in shows the original.
            stand_in = processor(current, __call__=current.__call__)
            like = intercept.Overlay(self.target, processor=stand_in)
            return calling(type(self.target), "forward")()(like, *args, **kwargs)
        finally:
            intercept.current.answer = before

    def _call_operator(self, begun: torch.Tensor, attention_call: AttentionCall) -> torch.Tensor:
        """Return a call's output by the operator ``attend``; `begun` is ``begin``'s result or this site's number."""
        if not attention_call.plain:
            self.wraps.patch.ledger.note_traced(self.level, MORE)
            return attention_call.unmerged()
        tensors = attention_call.q, attention_call.k, attention_call.v, attention_call.mask
        options = attention_call.by_head, attention_call.scale, attention_call.gqa, attention_call.backend
        out = compiled.OPERATORS["attend"](begun, self.number, *tensors, *options)
        return attention_call.to_host_form(out)


def count_missed(
    wraps: WrapSet, call: ModelCall, missed: set[str] | None = None, batch: int = 0, tokens: int = 0
) -> None:
    """Count attentions that a model call did not reach, with the reason; if a wrap was taken off, put all wraps back.

    The reason is a replaced ``forward`` of the attention, of its block or, if the call reached no attention, of the
    model; or that the wrap was taken off. Attentions that no rule merges now, and those of compiled levels, do not
    count. `missed` has paths of attentions that were certainly missed. None: all that are not in
    ``call.called_attentions``; some of them may be skipped on purpose: if the call reached others and nothing replaced
    is found, such an attention does not count. `batch` and `tokens` are the size of each missed call, 0 if unknown.
    """
    model, is_lost = wraps.wraps[0].target if wraps.wraps else None, False
    for site in (wrap for wrap in wraps.wraps if wrap.path):
        is_missed = site.path not in call.called_attentions if missed is None else site.path in missed
        if not is_missed or call.rules[site.level].attn is None or call.state.ledger.levels[site.level].traced:
            continue
        block = module_at(model, site.path.rpartition(".")[0])
        places = [] if not site.is_on_top() else [block] if call.called_attentions else [block, model]
        replacements = over_hook(site.target), *map(foreign_method_on, filter(None, places))
        others = [full_name(method) for method in replacements if method is not None]
        why = f"{REPLACED}: {others[0]}" if others else REPLACED if places else why_missed(site)
        if missed is not None or why != REPLACED or not call.called_attentions:
            call.state.count_unmerged(site.level, why, batch, tokens)
        is_lost |= why == TAKEN_OFF
    if is_lost:
        wraps.put_back()


def module_at(model: nn.Module, path: str) -> nn.Module | None:
    """Return the module at a path; None if another program has put other modules there since, as block caches do."""
    try:
        return model.get_submodule(path)
    except AttributeError:
        return None


def named(kwargs: Mapping[str, Any], names: Sequence[str]) -> Any:
    """Return the value, which may be None, of the first of these names that is in `kwargs`; None if none is."""
    return next((kwargs[name] for name in names if name in kwargs), None)
