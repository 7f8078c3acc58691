"""Merging in ComfyUI's transformers: a function in the slot that their attentions ask, for one call of the model.

``transformer_options["optimized_attention_override"]`` is called in the place of ComfyUI's attention function, with
that function, after norm and rotary positions. What lies in the slot already is called by ours.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from . import attentions, host
from .engine import tome_core
from .layouts import grid_of, where_tokens_lie

sequence = tome_core.sequence
_PROBED = 64  # tokens
_LIKE = 0.1  # share by which the fast functions of half and less precision miss a small attention
_NOT_PLAIN = "another node's attention is in the slot, which does more than attention"


def is_compiled(model: Any, options: dict) -> bool:
    """Is it, or a block of it, under ``torch.compile``: in its place already, or by a wrapper of this call?

    ComfyUI has compiled code not look at transformer_options again. What was compiled with our function in them fails
    in every branch without it, and what was compiled without goes on so.
    """
    if host.COMPILE_KEY in options.get("wrappers", {}).get(host.APPLY_MODEL, ()):
        return True
    # in one walk, because every call asks
    return any("_orig_mod" in one._modules or one._compiled_call_impl is not None for one in model.modules())


class Slot:
    """What is known of the functions in the slot, in one sampling."""

    def __init__(self) -> None:
        self._found: dict[tuple, tuple[str, Any]] = {}

    def kind(self, function: Callable, inner: Any, described: Any, heads: int, like: torch.Tensor) -> str:
        """"bias" for an attention that adds a mask, "plain" for one that does not, else "".

        function: ComfyUI's. inner: what another node has put into the slot, which is tried on a few tokens, once.
        described: both, as the engine's `Host`. like: ``[..., d]``, of the device and dtype that it is to serve.
        """
        chosen = function if inner is None else attentions.find_chosen(inner)
        if chosen is not None:
            return "bias" if attentions.adds_a_mask(chosen) else "plain"
        key = id(function), id(inner), described.form, heads, like.dtype, like.device
        if key not in self._found:  # what has these ids is held, so that nobody else gets them
            self._found[key] = _try(described, heads, like), (function, inner)
        return self._found[key][0]


def options_with(handle: Any, model: Any, latent: Any, t: Any, options: dict, slot: Slot) -> dict:
    """The transformer_options of a call of the model, of these latents at this time, with our function in the slot."""
    names = options.get("uuids")
    call = handle.begin(t, latent, tuple(names) if names else None)
    inner, grid, asked = options.get(attentions.OVERRIDE), grid_of(model, latent), Counter()

    def attention(function, q, k, v, heads, mask=None, attn_precision=None, skip_reshape=False,
                  skip_output_reshape=False, **others):  # fmt: skip
        def plainly(q, k, v, mask):
            more = {"attn_precision": attn_precision, "skip_reshape": skip_reshape,
                    "skip_output_reshape": skip_output_reshape, **others}  # fmt: skip
            if inner is None:
                return function(q, k, v, heads, mask=mask, **more)
            return inner(function, q, k, v, heads, mask=mask, **more)

        told = others.get("transformer_options") or options
        form, out_form = (sequence.BY_HEAD if one else sequence.FLAT for one in (skip_reshape, skip_output_reshape))
        queries, keys, values = (one.shape[2 if skip_reshape else 1] for one in (q, k, v))
        width = q.shape[-1] if skip_reshape else q.shape[-1] // heads
        described = sequence.Host(plainly, form, out_form, others.get("scale") or width**-0.5)
        layout, kind = _problem((queries, keys, values), mask, grid) or where_tokens_lie(model, grid, queries, told), ""
        if not isinstance(layout, str):
            kind = slot.kind(function, inner, described, heads, q)
            layout = layout if kind else _NOT_PLAIN
        if isinstance(layout, str):
            handle.leave_alone(call, layout, q.shape[0], queries, keys)
            return plainly(q, k, v, mask)
        place = told.get("block_type"), told.get("block_index")
        asked[place] += 1
        key_heads = k.shape[1] if skip_reshape else k.shape[-1] // width
        described = described._replace(takes_bias=kind == "bias")
        out = handle.attend(call, (*place, asked[place]), described, q, k, v, heads, layout, key_heads)
        return plainly(q, k, v, mask) if out is None else out

    return {**options, attentions.OVERRIDE: attention}


def _problem(tokens: tuple[int, int, int], mask: Any, grid: Any) -> str | None:
    if len(set(tokens)) > 1:
        return "queries and keys are not of the same tokens"
    if mask is not None:
        return tome_core.reporting.reasons.MASKED
    return "the latent has no grid that is known" if grid is None else None


def _try(described: Any, heads: int, like: torch.Tensor) -> str:
    """Is it attention, and what does it do with a mask? See `Slot.kind`. One that refuses masks adds none."""
    generator = torch.Generator().manual_seed(0)
    width = like.shape[-1] if described.form == sequence.BY_HEAD else like.shape[-1] // heads
    q, k, v = torch.randn(3, 1, _PROBED, heads, width, generator=generator).to(like)
    mask = torch.zeros(1, 1, 1, _PROBED).to(like)
    mask[..., : _PROBED // 2] = 4.0
    by_head, kind = [one.transpose(1, 2) for one in (q, k, v)], ""
    try:
        for bias, kind in ((None, ""), (mask, "plain")):
            exact = F.scaled_dot_product_attention(*by_head, bias, scale=described.scale).transpose(1, 2)
            found = described.function(*(sequence.in_form(one, described.form) for one in (q, k, v)), bias)
            found = sequence.by_token(found, described.out_form, heads)
            if found.shape != exact.shape or not (found - exact).norm() < _LIKE * exact.norm():
                return kind
    except Exception:  # whatever it is, it does not serve a few tokens, or these with a mask
        return kind
    return "bias"
