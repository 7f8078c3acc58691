"""The wraps on a transformer: around its forward, where a call begins, and around each attention of its picture.

While a compiler traces, each puts an operator of `in_graph` into the graph, which asks it again when the graph runs.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from ..compiling import compiles_here, when_traced
from ..merging.grid import Grid
from ..reporting.reasons import MASKED, REPLACED
from ..running.call import Call
from ..running.operators import NumberedSite
from ..sequence import BY_HEAD, Layout, SequenceMerging, by_token, in_form
from . import in_graph
from .arguments import arguments_of, pack, pick_arguments, unpack
from .families import Family, Tokens, family_of
from .function import Given, Options, answering, ask_again, exchange_processor

MORE = "it is more than attention (dropout, causal, or over several devices)"


class Going(NamedTuple):
    """The call of a transformer that goes on in a thread. tokens: `Tokens`' grid and count, or why there is none."""

    merging: SequenceMerging
    call: Call
    tokens: tuple[Grid, int] | str


class Calls(threading.local):
    """Of one transformer, in each thread. A copy of the transformer begins without any, and merges nothing.

    in_graph: the latest that a graph has begun.
    """

    now: Going | None = None
    in_graph: Going | None = None

    def __reduce__(self) -> tuple:
        return Calls, ()


class Settings:
    """Whose settings are in force on a transformer, if anybody's.

    begun: while a compiler traces the transformer's own call, what `in_graph.attend` takes, or why it is left alone.
    """

    def __init__(self) -> None:
        self.merging: SequenceMerging | None = None
        self.begun: torch.Tensor | str | None = None

    def __reduce__(self) -> tuple:
        return Settings, ()


class ModelSite(NumberedSite):
    """Around ``transformer.forward``: begins a call, from the arguments that tell its time and its grid."""

    operators = in_graph.OPERATORS

    def __init__(self, model: nn.Module, family: Family, settings: Settings, calls: Calls) -> None:
        super().__init__(model)
        self.family, self.settings, self.calls = family, settings, calls

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model gives."""
        merging = self.settings.merging
        if not self.active or merging is None:
            return self.original(*args, **kwargs)
        if torch.compiler.is_compiling() and compiles_here():
            return self._trace(merging, args, kwargs)
        given = arguments_of(self.target, args, kwargs)
        before, self.calls.now = self.calls.now, self._going(merging, given)
        try:
            return self.original(*args, **kwargs)
        finally:
            self.calls.now = before

    def begins(self, form: str, tensors: list[torch.Tensor], numbers: list[int]) -> None:
        """A call of the model, compiled as a whole, begins; its graph says so, with what the family reads."""
        self.calls.in_graph, merging = None, self.settings.merging
        if merging is not None:
            given = dict(zip(self.family.reads, unpack(form, tensors, numbers), strict=True))
            going = self._going(merging, given)
            self.calls.in_graph = going._replace(call=merging.run.keep_in_graph(going.call))

    def _going(self, merging: SequenceMerging, given: Mapping[str, Any]) -> Going:
        tokens = self.family.tokens(self.target, given)
        latent = tokens.latent if isinstance(tokens, Tokens) else torch.empty(0)
        call = merging.begin(merging.timestep(self.family, given), latent)
        return Going(merging, call, tokens if isinstance(tokens, str) else (tokens.grid, tokens.count))

    def _trace(self, merging: SequenceMerging, args: tuple, kwargs: Mapping[str, Any]) -> Any:
        """The same in a graph that is being made."""
        settings = self.settings
        begun = _why_not_in_graph(merging)
        if begun is None:
            packed = pack(pick_arguments(self.target, self.family.reads, args, kwargs))
            begun = in_graph.begin(self.number, *packed) if packed else "a compiled call cannot be told such arguments"
        before, settings.begun = settings.begun, begun
        try:
            return self.original(*args, **kwargs)
        finally:
            settings.begun = before

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in super().__getstate__().items() if key != "family"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.family = family_of(self.target)


class AttentionSite(NumberedSite):
    """Around the forward of an attention over the picture's tokens, whose processor is asked for q, k and v."""

    operators = in_graph.OPERATORS

    def __init__(self, path: str, module: nn.Module, text_first: bool, settings: Settings, calls: Calls) -> None:
        super().__init__(module)
        self.path, self.text_first, self.settings, self.calls = path, text_first, settings, calls

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the attention gives."""
        if torch.compiler.is_compiling() and compiles_here():
            return self._trace(args, kwargs)
        going = self.calls.now
        if not self.active or going is None:
            return self.original(*args, **kwargs)
        instead = exchange_processor(self.target) if self.beneath is None else REPLACED
        if isinstance(going.tokens, str):
            instead = going.tokens
        if isinstance(instead, str):
            self._leave(going, instead, next((one for one in (*args, *kwargs.values()) if torch.is_tensor(one)), None))
            return self.original(*args, **kwargs)
        with answering(partial(self._answer, going)):
            return type(self.target).forward(instead, *args, **kwargs)

    def answers(
        self, whole: bool, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None,
        options: Options,
    ) -> torch.Tensor:  # fmt: skip
        """What a compiled graph asks for in its call. whole: is the model's own call in the graph?"""
        going = self.calls.in_graph if whole else self.calls.now
        if whole and going is not None:
            going = going._replace(call=going.call._replace(kept=going.merging.run.kept_in_graph))
        with answering(None if going is None else partial(self._answer, going)):
            return ask_again(self.target.processor, q, k, v, mask, options)

    def _trace(self, args: tuple, kwargs: Mapping[str, Any]) -> Any:
        """The attention in a graph that is being made."""
        merging, begun = self.settings.merging, self.settings.begun
        if not self.active or merging is None:
            return self.original(*args, **kwargs)
        why = _why_not_in_graph(merging) if begun is None else begun
        instead = exchange_processor(self.target) if self.beneath is None else REPLACED
        if isinstance(why, str) or isinstance(instead, str):
            merging.run.ledger.skip(None, 0, "attn", why if isinstance(why, str) else instead)
            return self.original(*args, **kwargs)
        with answering(partial(self._ask, merging, self.number if begun is None else begun)):
            return self._of_class(instead, *args, **kwargs)

    def _ask(self, merging: SequenceMerging, begun: torch.Tensor, given: Given) -> torch.Tensor:
        if not given.plain:
            merging.run.ledger.skip(None, 0, "attn", MORE)
            return given.function(given.q, given.k, given.v, given.mask)
        return in_graph.attend(begun, self.number, given.q, given.k, given.v, given.mask, given.options)

    def _leave(self, going: Going, why: str, x: torch.Tensor | None) -> None:
        batch, tokens = (0, 0) if x is None else x.shape[:2]
        going.merging.leave_alone(going.call, why, batch, tokens, tokens)

    def _answer(self, going: Going, given: Given) -> torch.Tensor:
        heads = given.q.shape[1 if given.form == BY_HEAD else 2]
        q, k, v = (by_token(one, given.form, heads) for one in (given.q, given.k, given.v))
        if k.shape[1] != q.shape[1]:  # to a prompt, or to a picture that an adapter has brought
            return given.function(given.q, given.k, given.v, given.mask)
        seen = MORE if not given.plain else _find_seen(given.mask, q)
        if isinstance(going.tokens, str):
            seen = going.tokens
        if isinstance(seen, str):
            self._leave(going, seen, q)
            return given.function(given.q, given.k, given.v, given.mask)
        whole = q.shape[1]
        if seen is not None:
            q, k, v = (one[:, seen] for one in (q, k, v))
        grid, count = going.tokens
        layout = Layout(grid, q.shape[1] - count if self.text_first else 0)
        parts = (in_form(one, given.form) for one in (q, k, v))
        out = going.merging.attend(going.call, self.path, given.host, *parts, heads, layout, k.shape[2])
        if out is None:
            return given.function(given.q, given.k, given.v, given.mask)
        return out if seen is None else _put_back(out, seen, whole, given.form, heads)


def _why_not_in_graph(merging: SequenceMerging) -> str | None:
    """Why a graph that is being made must not ask, if it must not."""
    if not merging.ever_merges:
        return "no rule ever merges here"
    if torch.is_grad_enabled():
        return "a backward pass may follow a compiled call"
    if torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu"):
        return "autocast ends before what a compiled call asks for"
    if not (in_graph.TRIED and in_graph.OPERATORS.made):
        return "this torch's compiler was not tried with it"
    return "an exported model would need it wherever it runs" if _is_exporting() else None


@when_traced
def _is_exporting() -> bool:
    """Asked while it is traced: torch 2.9's compiler believes so of every graph."""
    return torch.compiler.is_exporting()


def _find_seen(mask: torch.Tensor | None, q: torch.Tensor) -> torch.Tensor | str | None:
    """Which tokens a mask leaves, as indices; None for all of them. It waits for the device.

    Tokens that nobody sees are padding, whose own outputs nobody sees either.
    """
    if mask is None:
        return None
    if mask.dtype != torch.bool or mask.shape[-1] != q.shape[1] or mask.numel() != mask.shape[0] * mask.shape[-1]:
        return MASKED
    rows = mask.reshape(mask.shape[0], -1)
    if rows.all():
        return None
    return rows[0].nonzero()[:, 0] if (rows == rows[:1]).all() else "a mask hides other tokens in each picture"


def _put_back(out: torch.Tensor, seen: torch.Tensor, whole: int, form: str, heads: int) -> torch.Tensor:
    """With zeros for the tokens that were left out."""
    told = by_token(out, form, heads)
    all_tokens = told.new_zeros(told.shape[0], whole, *told.shape[2:])
    all_tokens[:, seen] = told
    return in_form(all_tokens, form)
