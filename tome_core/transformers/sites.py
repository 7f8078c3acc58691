"""The wraps on a transformer: around its forward, where a call begins, and around each attention of its picture."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from ..model.wrap import Wrap
from ..running.call import Call
from ..sequence import Host, Layout, SequenceMerging, by_token, in_form
from .families import Family, Tokens, arguments_of, family_of
from .function import Given, answering, exchange_processor

COMPILED = "which transformers do not merge under"
FOREIGN = "something else runs in its place"
HIDES = "a mask hides other tokens in each picture"
MORE = "it is more than attention (dropout, causal, or over several devices)"


class Going(NamedTuple):
    """The call of a transformer that goes on in a thread."""

    merging: SequenceMerging
    call: Call
    tokens: Tokens | str


class Calls(threading.local):
    """Of one transformer, in each thread. A copy of the transformer begins without any, and merges nothing."""

    now: Going | None = None

    def __reduce__(self) -> tuple:
        return Calls, ()


class Settings:
    """Whose settings are in force on a transformer, if anybody's."""

    def __init__(self) -> None:
        self.merging: SequenceMerging | None = None

    def __reduce__(self) -> tuple:
        return Settings, ()


class TransformerSite(Wrap):
    """Around ``transformer.forward``: begins a call, from the arguments that tell its time and its grid."""

    def __init__(self, model: nn.Module, family: Family, settings: Settings, calls: Calls) -> None:
        super().__init__(model)
        self.family, self.settings, self.calls = family, settings, calls

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model gives."""
        merging = self.settings.merging
        if not self.active or merging is None:
            return self.original(*args, **kwargs)
        if torch.compiler.is_compiling():
            merging.run.ledger.skip(None, 0, "attn", COMPILED)
            return self.original(*args, **kwargs)
        given = arguments_of(self.target, args, kwargs)
        tokens = self.family.tokens(self.target, given)
        latent = tokens.latent if isinstance(tokens, Tokens) else torch.empty(0)
        before, self.calls.now = self.calls.now, Going(
            merging, merging.begin(merging.timestep(self.family, given), latent), tokens
        )
        try:
            return self.original(*args, **kwargs)
        finally:
            self.calls.now = before

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in super().__getstate__().items() if key != "family"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.family = family_of(self.target)


class AttentionSite(Wrap):
    """Around the forward of an attention over the picture's tokens, whose processor is asked for q, k and v."""

    def __init__(self, path: str, module: nn.Module, text_first: bool, settings: Settings, calls: Calls) -> None:
        super().__init__(module)
        self.path, self.text_first, self.settings, self.calls = path, text_first, settings, calls

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the attention gives."""
        if torch.compiler.is_compiling():  # a block by itself: the model's own call is not
            if self.active and self.settings.merging is not None:
                self.settings.merging.run.ledger.skip(None, 0, "attn", COMPILED)
            return self.original(*args, **kwargs)
        going = self.calls.now
        if not self.active or going is None:
            return self.original(*args, **kwargs)
        instead = exchange_processor(self.target) if self.beneath is None else FOREIGN
        if isinstance(going.tokens, str):
            instead = going.tokens
        if isinstance(instead, str):
            self._leave(going, instead, next((one for one in (*args, *kwargs.values()) if torch.is_tensor(one)), None))
            return self.original(*args, **kwargs)
        with answering(partial(self._answer, going)):
            return type(self.target).forward(instead, *args, **kwargs)

    def _leave(self, going: Going, why: str, x: torch.Tensor | None) -> None:
        batch, tokens = (0, 0) if x is None else x.shape[:2]
        going.merging.leave_alone(going.call, why, batch, tokens, tokens)

    def _answer(self, going: Going, given: Given) -> torch.Tensor:
        heads = given.q.shape[1 if given.form == "BHSD" else 2]
        q, k, v = (by_token(one, given.form, heads) for one in (given.q, given.k, given.v))
        if k.shape[1] != q.shape[1]:  # to a prompt, or to a picture that an adapter has brought
            return given.function(given.q, given.k, given.v, given.mask)
        seen = MORE if not given.plain else _seen(given.mask, q)
        if isinstance(seen, str):
            self._leave(going, seen, q)
            return given.function(given.q, given.k, given.v, given.mask)
        whole = q.shape[1]
        if seen is not None:
            q, k, v = (one[:, seen] for one in (q, k, v))
        tokens = going.tokens
        layout = Layout(tokens.grid, q.shape[1] - tokens.count if self.text_first else 0)
        parts = (in_form(one, given.form) for one in (q, k, v))
        host = Host(given.function, given.form, given.form, given.scale, given.takes_bias)
        out = going.merging.attend(going.call, self.path, host, *parts, heads, layout, k.shape[2])
        if out is None:
            return given.function(given.q, given.k, given.v, given.mask)
        return out if seen is None else _put_back(out, seen, whole, given.form, heads)


def _seen(mask: torch.Tensor | None, q: torch.Tensor) -> torch.Tensor | str | None:
    """Which tokens a mask leaves, as indices; None for all of them. It waits for the device.

    Tokens that nobody sees are padding, whose own outputs nobody sees either.
    """
    if mask is None:
        return None
    if mask.dtype != torch.bool or mask.shape[-1] != q.shape[1] or mask.numel() != mask.shape[0] * mask.shape[-1]:
        return "an attention mask came along"
    rows = mask.reshape(mask.shape[0], -1)
    if rows.all():
        return None
    return rows[0].nonzero()[:, 0] if (rows == rows[:1]).all() else HIDES


def _put_back(out: torch.Tensor, seen: torch.Tensor, whole: int, form: str, heads: int) -> torch.Tensor:
    """With zeros for the tokens that were left out."""
    told = by_token(out, form, heads)
    all_tokens = told.new_zeros(told.shape[0], whole, *told.shape[2:])
    all_tokens[:, seen] = told
    return in_form(all_tokens, form)
