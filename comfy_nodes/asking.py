"""The slot of ComfyUI's attentions, filled for one call of the model: who answers, in eager code and in a graph.

A compiled UNet's graph asks by the engine's operator, which asks us while it runs. ComfyUI's graphs take no notice of
transformer_options, so those that merge are told from others by a keyword of the model's forward.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from .host import hosting
from .slot import SLOT, HostCall, Through

Ask = Callable[[HostCall, dict[str, Any]], torch.Tensor]  # a call, and its transformer_options
GRAPH = {"tome": True}  # a UNet takes any keyword, and does nothing with it
_functions: list[Callable] = []  # attention functions of ComfyUI, which graphs name by their places here


class _Now(threading.local):
    """This thread's call of a model. ask: what answers; beneath: what was in its slot; options: its own."""

    ask: Ask | None = None
    beneath: Callable | None = None
    options: dict[str, Any] = {}  # noqa: RUF012 (never changed)

    def answers(self, whole: bool, q: Any, k: Any, v: Any, mask: Any, by_head: bool, scale: Any, *rest: Any) -> Any:
        """What a graph asks for, ``[B, S, H, d]``; the last argument is the text of `_attention`."""
        place, kind, number, index, precision = rest[-1].split()
        options = {**self.options, "block": (kind, int(number)), "block_index": int(index)}
        more = {"scale": scale, "attn_precision": torch.float32 if precision != "None" else None}
        out = _attention(
            _functions[int(place)], q.flatten(2), k.flatten(2), v.flatten(2), q.shape[2], mask,
            _inside_attn_wrapper=True, transformer_options=options, **{key: one for key, one in more.items() if one},
        )  # fmt: skip
        return out.unflatten(-1, (q.shape[2], -1))


_now = _Now()
_number = hosting.number_of(_now)


def call(run: Callable, options: dict[str, Any], ask: Ask, **more: Any) -> Any:
    """What ``run(transformer_options, **more)`` gives, a call of the model whose attentions ``ask`` answers."""
    before = _now.ask, _now.beneath, _now.options
    if options.get(SLOT) is not _attention:  # else the model is called again inside its own call
        _now.beneath = options.get(SLOT)
    _now.ask, _now.options = ask, options
    try:
        return run({**options, SLOT: _attention}, **more)
    finally:
        _now.ask, _now.beneath, _now.options = before


def _attention(function, q, k, v, heads, mask=None, attn_precision=None, **more):
    options = more.get("transformer_options") or _now.options
    if torch.compiler.is_compiling() and hosting.is_tracing():
        asked, block = HostCall(function, q, k, v, heads, mask, **more), options.get("block", ("none", 0))
        told = f"{_place_of(function)} {block[0]} {block[1]} {options.get('block_index', 0)} {attn_precision}"
        attend, rest = hosting.OPERATORS["attend"], (mask, False, asked.scale, False, told)
        return asked.give_back(attend(_number, _number, asked.q, asked.k, asked.v, *rest))
    own = Through(_now.beneath, function) if _now.beneath else function
    asked = HostCall(own, q, k, v, heads, mask, attn_precision, **more)
    return _now.ask(asked, options) if _now.ask else asked.unmerged()


@hosting.when_traced
def _place_of(function: Callable) -> int:
    if function not in _functions:
        _functions.append(function)
    return _functions.index(function)
