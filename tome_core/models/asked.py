"""Calls of attention functions, each in its host's form, and what is answered in their place."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
import torch.nn.functional

from ..attention.by_hand import full_name
from ..attention.functions import try_once
from ..attention.merged import Attention
from ..engine.decision import Call
from ..engine.state import State
from ..merging.grid import Layout
from ..reporting.ledger import MASKED, NO_GRID

TORCHS_OWN = torch._C._nn.scaled_dot_product_attention
_OPTIONS = ("dropout_p", "is_causal", "scale", "enable_gqa", "attention_kwargs")
MORE = "it is more than attention (dropout, causal, or over several devices)"
_FAILS = "it fails with merged keys"
# hosts interrupt a picture by exceptions of their own, which are none of these
_REFUSALS = (ArithmeticError, AssertionError, LookupError, RuntimeError, TypeError, ValueError)


class Asked:
    """One call of an attention function that has not been computed.

    q, k, v: views ``[B, S, H, d]``. mask: as it came along. scale: as it came, None for the function's own. plain: the
    call asks for nothing but attention. by_head: its function takes ``[B, H, S, d]``; gqa, backend: what an operator of
    a compiled graph is told besides. is_flat: heads lie within the batch, until `split`. adds_bias: the function does,
    if that is known without asking. Subclasses keep the call as it came in ``_function``, ``_own`` and ``_more``.
    """

    by_head, gqa, backend, is_flat, plain = False, False, "", False, True
    adds_bias: bool | None = None
    mask: torch.Tensor | None = None
    scale: float | None = None
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    def unmerged(self) -> torch.Tensor:
        """What the host's function gives, in its own form."""
        return self._function(*self._own, self.mask, **self._more)

    def compute(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """The host's function on other tensors, all ``[B, S, H, d]``."""
        if not self.by_head:
            return self._function(q, k, v, bias, **self._more)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        return self._function(q, k, v, bias, **self._more).transpose(1, 2)

    def give_back(self, out: torch.Tensor) -> torch.Tensor:
        """``[B, S, H, d]`` in the form in which the host's function returns it."""
        return out.transpose(1, 2) if self.by_head else out

    def takes_bias(self) -> bool | None:
        """Does the function add a bias? None if it is no attention."""
        scale = self.q.shape[-1] ** -0.5 if self.scale is None else self.scale
        return try_once(self.key(), self.compute, scale, self.q)

    def key(self) -> tuple:
        """What tells the function from all others."""
        return (self._function,)


class ByTorch(Asked):
    """torch's function, ``[B, H, S, d]`` or ``[B*H, S, d]``; or one like it."""

    by_head = True

    def __init__(self, function, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None,
                 enable_gqa=False, attention_kwargs=None, **more):  # fmt: skip
        self._function, self._own, self._more = function, (query, key, value), more
        for name, one in zip(_OPTIONS, (dropout_p, is_causal, scale, enable_gqa, attention_kwargs), strict=True):
            if one:  # a replacement may know no more than is asked
                more[name] = one
        self.mask, self.scale, self.gqa = attn_mask, scale, enable_gqa
        self.plain = not (dropout_p or is_causal) and query.dim() == 4
        if function is TORCHS_OWN:
            self.adds_bias = True
        if query.dim() == 3:
            self.q, self.k, self.v = (one.unsqueeze(-2) for one in self._own)
        elif self.by_head:
            self.q, self.k, self.v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        else:
            self.q, self.k, self.v = self._own


class ByDispatch(ByTorch):
    """diffusers' `dispatch_attention_fn`, ``[B, S, H, d]``, which looks up the backend in force at each call."""

    by_head = False

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        more = self._more
        self.backend = str(getattr(more.get("backend"), "value", more.get("backend") or ""))
        self.plain = self.plain and not more.get("attention_kwargs") and more.get("parallel_config") is None

    def key(self) -> tuple:
        """With the backend in force."""
        registry = getattr(self._function, "__globals__", {}).get("_AttentionBackendRegistry")
        active = "native" if registry is None else registry.get_active_backend()[0]
        backend = self.backend or str(getattr(active, "value", active))
        return self._function, backend, torch.nn.functional.scaled_dot_product_attention


class ByXformers(Asked):
    """``xformers.ops.memory_efficient_attention``, ``[B, S, H, d]`` or ``[B*H, S, d]``; its bias is never asked for."""

    adds_bias = False

    def __init__(self, function, query, key, value, attn_bias=None, p=0.0, scale=None, **more):
        self._function, self._own, self._more = function, (query, key, value), {"p": p, "scale": scale, **more}
        self.mask, self.scale = attn_bias, scale
        self.plain = not p and not set(more) - {"op"}
        self.is_flat = query.dim() == 3
        self.q, self.k, self.v = (one.unsqueeze(-2) if self.is_flat else one for one in self._own)

    def split(self, heads: int) -> None:
        """Tell apart the heads, as the function takes them too."""
        self.q, self.k, self.v = (one.unflatten(0, (-1, heads)).transpose(1, 2) for one in self._own)

    def give_back(self, out: torch.Tensor) -> torch.Tensor:
        """As it came."""
        return out.transpose(1, 2).flatten(0, 1) if self.is_flat else out


class ByHeads(Asked):
    """``function(q, k, v, heads, mask=None, ...)`` of ComfyUI, Forge and reForge: flat ``[B, S, H*d]``, or
    ``[B, H, S, d]`` if it skips the reshape. It is already bound to whatever else stands in between.
    """

    def __init__(self, function, q, k, v, heads, mask=None, attn_precision=None, skip_reshape=False,
                 skip_output_reshape=False, **more):  # fmt: skip
        self._function, self._own, self._heads, self._more = function, (q, k, v), heads, more
        self._in, self._out = skip_reshape, skip_output_reshape
        asked = {"attn_precision": attn_precision, "skip_reshape": skip_reshape, "skip_output_reshape": self._out}
        more.update((name, value) for name, value in asked.items() if value)
        self.mask, self.scale = mask, more.get("scale")
        if skip_reshape:
            self.q, self.k, self.v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        else:
            width = q.shape[-1] // heads
            # ComfyUI's SD3 hands over values whose heads are apart already
            self.q, self.k, self.v = (one.reshape(*one.shape[:2], -1, width) for one in (q, k, v))

    def unmerged(self) -> torch.Tensor:
        """As of every call."""
        return self._function(*self._own, self._heads, mask=self.mask, **self._more)

    def compute(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """As of every call."""
        q, k, v = (one.transpose(1, 2) if self._in else one.flatten(2) for one in (q, k, v))
        out = self._function(q, k, v, self._heads, mask=bias, **self._more)
        return out.transpose(1, 2) if self._out else out.unflatten(-1, (self._heads, -1))

    def give_back(self, out: torch.Tensor) -> torch.Tensor:
        """As it is to be returned."""
        return out.transpose(1, 2) if self._out else out.flatten(2)

    def key(self) -> tuple:
        """With the forms of the call."""
        return (self._function, self._in, self._out, self._heads)


def answer(
    state: State, call: Call, name: Hashable, level: int, heads: int, where: Layout | Callable[[int], Layout | str],
    seen: list[bool], asked: Asked,
) -> torch.Tensor:  # fmt: skip
    """What an attention function would have given, in its host's form.

    Args:
        state, call, name, level: as of `State.attend`.
        heads: of the attention, if they lie within the batch.
        where: the picture's tokens, if there are no others; else tells where they lie among so many, or why that is not
            known.
        seen: an entry is added: is it to the tokens themselves?
        asked: the call.
    """
    if asked.is_flat:
        asked.split(heads)
    q, k, v = asked.q, asked.k, asked.v
    is_own = k.shape[:2] == q.shape[:2]
    seen.append(is_own)
    if not is_own:  # to a prompt, or to a picture that an adapter has brought
        return asked.unmerged()
    rows, why = (None, "") if asked.mask is None else _rows_seen(asked.mask, q)
    tokens = q.shape[1] if rows is None else len(rows)
    if not isinstance(where, Layout):
        where = where(tokens)
    elif where.grid.height * where.grid.width != tokens:
        where = NO_GRID
    why = why or (where if isinstance(where, str) else "" if asked.plain else MORE)
    why = why or (state.refused and state.refused.get(asked.key(), ""))
    takes_bias = asked.adds_bias
    if takes_bias is None and not why:
        takes_bias = asked.takes_bias()
        own = full_name([*filter(callable, asked.key())][-1])
        why = f"the function that it calls is no attention: {own}" if takes_bias is None else ""
    if why:
        state.leave_alone(level, why, q.shape[0], q.shape[1], k.shape[1])
        return asked.unmerged()
    if rows is not None:
        q, k, v = q[:, rows], k[:, rows], v[:, rows]
    scale = q.shape[3] ** -0.5 if asked.scale is None else asked.scale
    try:
        out = state.attend(call, name, level, where, Attention(q, k, v, asked.compute, scale, takes_bias))
    except _REFUSALS as error:
        if isinstance(error, torch.cuda.OutOfMemoryError) or "out of memory" in str(error):
            raise
        given = asked.unmerged()  # before it is believed: what fails unmerged too is no refusal
        told = f"{type(error).__name__}: {' '.join(str(error).split())[:80]}"
        why = state.refused[asked.key()] = f"{_FAILS} ({told})"
        state.leave_alone(level, why, q.shape[0], q.shape[1], k.shape[1])
        return given
    if out is None:
        return asked.unmerged()
    if rows is not None:
        whole = out.new_zeros(out.shape[0], asked.q.shape[1], *out.shape[2:])
        whole[:, rows] = out  # DirectML has no index_copy
        out = whole
    return asked.give_back(out)


def _rows_seen(mask: torch.Tensor, q: torch.Tensor) -> tuple[torch.Tensor | None, str]:
    """Which tokens a mask leaves, as indices, None for all of them; and why that is not known. It waits for the device.

    Tokens that nobody sees are padding, whose own outputs nobody sees either; a mask for each pair of tokens says the
    same where those that it leaves see all of each other and nothing else.
    """
    tokens, masks = q.shape[1], len(mask)
    is_square = mask.numel() == masks * tokens**2
    if mask.dtype != torch.bool or mask.shape[-1] != tokens or not (is_square or mask.numel() == masks * tokens):
        return None, MASKED
    pairs = mask.reshape(masks, -1, tokens)
    rows = pairs.diagonal(dim1=1, dim2=2) if is_square else pairs[:, 0]
    seen = rows * rows.sum(1, keepdim=True)
    if is_square and not ((pairs.sum(1) == seen) & (pairs.sum(2) == seen)).all():
        return None, MASKED
    if rows.all():
        return None, ""
    are_equal = bool((rows == rows[:1]).all())
    return (rows[0].nonzero()[:, 0], "") if are_equal else (None, "a mask hides other tokens in each picture")
