"""The answer to a caught attention call: merged keys and values if possible, else the call as the host made it."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch

from ..attention.descriptions import full_name
from ..attention.merged import Attention
from ..engine.decision import ModelCall
from ..engine.state import State
from ..faults import may_be_of_fewer_tokens, text_of
from ..merging.grid import Layout
from ..reporting.ledger import MASKED, NO_GRID, Reason
from .attention_calls import MORE, AttentionCall

_HIDDEN = Reason("an attention mask hides a part of the picture")


def attend_call(
    state: State, call: ModelCall, name: Hashable, level: int, heads: int,
    layout: Layout | Callable[[int], Layout | Reason], seen: list[bool], attention_call: AttentionCall,
) -> torch.Tensor:  # fmt: skip
    """Return the output, in the host's form, of an intercepted attention call, with merged keys and values if possible.

    The state counts each self-attention, merged or not; other attentions are called unmerged and not counted. If a
    function fails with merged keys, but not without, its `key` is noted in the state, and it is called unmerged now and
    later. Out-of-memory errors and a host's own exceptions, such as its interrupts, are raised. If the call
    merges, tokens that a mask hides get zeros.

    `name` is unique in the model and the same at every step; `level` is 0 for the finest; `heads` is used if
    `attention_call.is_flat`. `layout` is the picture's if the sequence has no other tokens: a call with another number
    does not merge. Otherwise `layout` is a function that takes the number of tokens that a mask leaves visible, and
    returns the picture's layout or the reason why it is unknown. `seen` gets one more entry: True for self-attention,
    which has as many keys as queries, False if the keys are of other tokens.
    """
    if attention_call.is_flat:
        attention_call.split(heads)
    q, k, v = attention_call.q, attention_call.k, attention_call.v
    is_self_attention = k.shape[:2] == q.shape[:2]
    seen.append(is_self_attention)
    if not is_self_attention:  # attention to a prompt, or to an adapter's reference picture
        return attention_call.unmerged()
    tally = state.ledger.levels[level]
    tally.channels = tally.channels or q.shape[2] * q.shape[3]
    rows, why = (None, "") if attention_call.mask is None else _visible_rows(attention_call.mask, q)
    tokens = q.shape[1] if rows is None else len(rows)
    if not isinstance(layout, Layout):
        layout = layout(tokens)
    elif layout.grid.height * layout.grid.width != tokens:
        layout = NO_GRID if rows is None else _HIDDEN
    why = why or (layout if isinstance(layout, Reason) else "" if attention_call.plain else MORE)
    why = why or (state.refused and state.refused.get(attention_call.key(), ""))
    takes_bias = attention_call.adds_bias
    if takes_bias is None and not why:
        kind = attention_call.key(), *q.shape[2:], q.dtype, q.device
        if kind not in state.trials:
            state.trials[kind] = attention_call.takes_bias()
        takes_bias = state.trials[kind]
        if takes_bias is None:
            name_of = full_name([*filter(callable, kind[0])][-1])
            why = f"the function that it calls is no attention: {name_of}"
    if why:
        state.count_unmerged(level, why, *q.shape[:2])
        return attention_call.unmerged()
    if rows is not None:
        q, k, v = q[:, rows], k[:, rows], v[:, rows]
    scale = q.shape[3] ** -0.5 if attention_call.scale is None else attention_call.scale
    try:
        out = state.attend(call, name, level, layout, Attention(q, k, v, attention_call.compute, scale, takes_bias))
    except Exception as error:
        if not may_be_of_fewer_tokens(error):
            raise
        result = attention_call.unmerged()  # first: if the unmerged call fails too, merging is not the cause
        why = state.refused[attention_call.key()] = f"it fails with merged tokens ({text_of(error)})"
        state.count_unmerged(level, why, *q.shape[:2])
        return result
    if out is None:
        return attention_call.unmerged()
    if rows is not None:
        # hidden tokens are padding, so their outputs are not used
        whole = out.new_zeros(out.shape[0], attention_call.q.shape[1], *out.shape[2:])
        whole[:, rows] = out  # DirectML has no index_copy
        out = whole
    return attention_call.to_host_form(out)


def _visible_rows(mask: object, q: torch.Tensor) -> tuple[torch.Tensor | None, str]:
    """Return indices, int64 ``(visible,)``, of the tokens that a boolean mask, not None, leaves visible, and "".

    The mask is of keys, or of pairs ``(query, key)`` if visible tokens see each other and nothing else. ``(None, "")``
    if it leaves all visible; None and a reason for other masks, and if pictures of the batch hide different tokens.
    `q`, ``(batch, tokens, ...)``, shows the number of tokens.
    """
    if not torch.is_tensor(mask):  # a description of a mask, such as those of xformers
        return None, MASKED
    tokens, masks = q.shape[1], len(mask)
    is_square = mask.numel() == masks * tokens**2
    if mask.dtype != torch.bool or mask.shape[-1] != tokens or not (is_square or mask.numel() == masks * tokens):
        return None, MASKED
    pairs = mask.reshape(masks, -1, tokens)  # of pairs it is read if visible tokens see each other and nothing else
    rows = pairs.diagonal(dim1=1, dim2=2) if is_square else pairs[:, 0]
    seen = rows * rows.sum(1, keepdim=True)
    if is_square and not ((pairs.sum(1) == seen) & (pairs.sum(2) == seen)).all():
        return None, MASKED
    if rows.all():
        return None, ""
    are_equal = bool((rows == rows[:1]).all())
    return (rows[0].nonzero()[:, 0], "") if are_equal else (None, "the mask hides different tokens in each picture")
