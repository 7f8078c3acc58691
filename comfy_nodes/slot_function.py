"""The function that merges, put into ComfyUI's attention slot during one call of the model, eager or compiled."""

import threading
from collections.abc import Callable
from typing import Any

import torch

from .host import hosting
from .slot_calls import SLOT, HostCall, OtherNodesFunction

Ask = Callable[[HostCall, dict[str, Any]], torch.Tensor]  # computes a call, given its transformer_options
# a UNet ignores this keyword; graphs that merge are told apart by it, for their guards ignore transformer_options
GRAPH = {"tome": True}
_functions: list[Callable] = []  # ComfyUI's attention functions, which graphs identify by index


class _Now(threading.local):
    """The current call of a model in this thread, and its transformer_options, `options`."""

    ask: Ask | None = None  # outside a call None
    beneath: Callable | None = None  # another node's function that was in the slot
    options: dict[str, Any] = {}  # noqa: RUF012 (never changed)

    def attend_in_graph(self, whole: bool, q: Any, k: Any, v: Any, mask: Any, by_head: bool, scale: Any, *rest: Any):
        """Answer an attention ``[B, S, H, d]`` for a graph's operator ``attend``; outside a model's call, unmerged."""
        place, kind, number, index, precision = rest[-1].split()  # written by `_attention`
        options = {**self.options, "block": (kind, int(number)), "block_index": int(index)}
        more = {"scale": scale, "attn_precision": torch.float32 if precision != "None" else None}
        out = _attention(
            _functions[int(place)], q.flatten(2), k.flatten(2), v.flatten(2), q.shape[2], mask,
            _inside_attn_wrapper=True, transformer_options=options, **{key: fact for key, fact in more.items() if fact},
        )  # fmt: skip
        return out.unflatten(-1, (q.shape[2], -1))


_now = _Now()
_number = hosting.number_of(_now)


def call(run: Callable, options: dict[str, Any], ask: Ask, **more: Any) -> Any:
    """Return the model's output, ``run(transformer_options, **more)``, while ``ask`` computes the slot's attentions."""
    before = _now.ask, _now.beneath, _now.options
    if options.get(SLOT) is not _attention:  # otherwise the model is called inside its own call
        _now.beneath = options.get(SLOT)
    _now.ask, _now.options = ask, options
    try:
        return run({**options, SLOT: _attention}, **more)
    finally:
        _now.ask, _now.beneath, _now.options = before


def _attention(function, q, k, v, heads, mask=None, attn_precision=None, **more):
    """Return an attention's output in ComfyUI's form, from the current call's ``ask``; outside a call, unmerged.

    ComfyUI calls it with its own `function` and that function's arguments. While a graph is compiled, an operator goes
    into the graph, which computes this when the graph runs.
    """
    options = more.get("transformer_options") or _now.options
    if torch.compiler.is_compiling() and hosting.is_tracing():
        call, block = HostCall(function, q, k, v, heads, mask, **more), options.get("block", ("none", 0))
        text = f"{_place_of(function)} {block[0]} {block[1]} {options.get('block_index', 0)} {attn_precision}"
        attend, rest = hosting.OPERATORS["attend"], (mask, False, call.scale, False, text)
        return call.to_host_form(attend(_number, _number, call.q, call.k, call.v, *rest))
    whole = OtherNodesFunction(_now.beneath, function) if _now.beneath else function
    try:
        call = HostCall(whole, q, k, v, heads, mask, attn_precision, **more)
        return _now.ask(call, options) if _now.ask else call.unmerged()
    except Exception as error:
        if not hosting.is_ours(error):
            raise
    return whole(q, k, v, heads, mask=mask, attn_precision=attn_precision, **more)


def beneath() -> Callable | None:
    """Return the other node's function that was in the slot when the current call began; None if there was none."""
    return _now.beneath


def is_ours(function: Any) -> bool:
    """Tell whether a function is the one that merges."""
    return function is _attention


@hosting.when_traced
def _place_of(function: Callable) -> int:
    """Return a function's index in `_functions`, to which a new function is added."""
    if function not in _functions:
        _functions.append(function)
    return _functions.index(function)
