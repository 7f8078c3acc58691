"""Calls of attention functions in the form of each host."""

from __future__ import annotations

import torch
import torch.nn.functional

from ..attention.functions import probe_bias

TORCHS_OWN = torch._C._nn.scaled_dot_product_attention
_OPTIONS = ("dropout_p", "is_causal", "scale", "enable_gqa", "attention_kwargs")
MORE = "the call also uses dropout, a causal mask or several devices"


class AttentionCall:
    """An attention call of a host (the program that runs the model), caught before the function runs.

    `attend_call` first calls `split` if `is_flat`. It then returns `unmerged()`; or, if the call merges, `to_host_form`
    of the output of `compute` (of torch's function if a bias is needed and the host's adds none) for merged keys.
    Subclasses keep the function in ``_function``, its tensors in ``_qkv`` and its other arguments in ``_kwargs``.

    Attributes:
        q, k, v: views ``(batch, tokens, heads, head_dim)`` of the call's tensors.
        mask: the call's attention mask, or None.
        scale: the call's factor of the logits; None if the function uses its default.
        plain: False if the call must not merge: it uses dropout, a causal mask, several devices or further options.
        by_head: True if the function takes tensors ``(batch, heads, tokens, head_dim)``.
        is_flat: True if heads are part of the batch axis until `split` separates them.
        adds_bias: whether the function adds a bias to the logits; None if a trial has to show it, see `takes_bias`.
        gqa, backend: True if the call asks for grouped keys; the name of its backend or "". A graph passes both on.
    """

    by_head, gqa, backend, is_flat, plain = False, False, "", False, True
    adds_bias: bool | None = None
    mask: torch.Tensor | None = None
    scale: float | None = None
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    def unmerged(self) -> torch.Tensor:
        """Make the call as the host made it, on all tokens, and return what the host's function returns."""
        return self._function(*self._qkv, self.mask, **self._kwargs)

    def compute(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Call the host's function on other tensors of the form of `q`, with the call's options, and return its output.

        `bias`, ``(batch, 1, 1, keys)`` or None, takes the place of the mask.
        """
        if not self.by_head:
            return self._function(q, k, v, bias, **self._kwargs)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        return self._function(q, k, v, bias, **self._kwargs).transpose(1, 2)

    def to_host_form(self, out: torch.Tensor) -> torch.Tensor:
        """Return an output of the form of `q` in the form in which the host's function returns it."""
        return out.transpose(1, 2) if self.by_head else out

    def takes_bias(self) -> bool | None:
        """Try whether the function adds a bias to the logits, see `probe_bias`; None if it computes no attention."""
        scale = self.q.shape[-1] ** -0.5 if self.scale is None else self.scale
        return probe_bias(self.key(), self.compute, scale, self.q)

    def key(self) -> tuple:
        """Return a hashable key by which trials and failures are remembered: a tuple of the function alone."""
        return (self._function,)


class TorchCall(AttentionCall):
    """A call of torch's ``scaled_dot_product_attention``, or of a function with the same arguments.

    With dropout, a causal mask or 3-D tensors ``(batch * heads, tokens, head_dim)`` it does not merge. Options are
    passed on only if they are on, `more`, all other keyword arguments, always. `attention_kwargs` are further options
    of diffusers' dispatcher.
    """

    by_head = True

    def __init__(self, function, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None,
                 enable_gqa=False, attention_kwargs=None, **more):  # fmt: skip
        self._function, self._qkv, self._kwargs = function, (query, key, value), more
        for name, option in zip(_OPTIONS, (dropout_p, is_causal, scale, enable_gqa, attention_kwargs), strict=True):
            if option:  # a replacement of torch's function may lack options that are off
                more[name] = option
        self.mask, self.scale, self.gqa = attn_mask, scale, enable_gqa
        self.plain = not (dropout_p or is_causal) and query.dim() == 4
        if function is TORCHS_OWN:
            self.adds_bias = True
        if query.dim() == 3:
            self.q, self.k, self.v = (tensor.unsqueeze(-2) for tensor in self._qkv)
        elif self.by_head:
            self.q, self.k, self.v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        else:
            self.q, self.k, self.v = self._qkv


class DispatchCall(TorchCall):
    """A call of diffusers' ``dispatch_attention_fn``, which looks up the active backend at each call.

    The arguments are those of `TorchCall`, but the tensors are ``(batch, tokens, heads, head_dim)``. A call with
    ``attention_kwargs`` or a ``parallel_config`` (several devices) does not merge either.
    """

    by_head = False

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        more = self._kwargs
        self.backend = str(getattr(more.get("backend"), "value", more.get("backend") or ""))
        self.plain = self.plain and not more.get("attention_kwargs") and more.get("parallel_config") is None

    def key(self) -> tuple:
        """Return the dispatcher, the name of the call's or the active backend, and the function under torch's name."""
        registry = getattr(self._function, "__globals__", {}).get("_AttentionBackendRegistry")
        active = "native" if registry is None else registry.get_active_backend()[0]
        backend = self.backend or str(getattr(active, "value", active))
        return self._function, backend, torch.nn.functional.scaled_dot_product_attention


class XformersCall(AttentionCall):
    """A call of ``xformers.ops.memory_efficient_attention``; merged calls with a bias go to torch's function instead.

    The tensors are ``(batch, tokens, heads, head_dim)`` or ``(batch * heads, tokens, head_dim)``. `attn_bias` is the
    mask, `p` the dropout probability. A call with dropout or with options other than ``op`` does not merge.
    """

    adds_bias = False

    def __init__(self, function, query, key, value, attn_bias=None, p=0.0, scale=None, **more):
        self._function, self._qkv, self._kwargs = function, (query, key, value), {"p": p, "scale": scale, **more}
        self.mask, self.scale = attn_bias, scale
        self.plain = not p and not set(more) - {"op"}
        self.is_flat = query.dim() == 3
        self.q, self.k, self.v = (tensor.unsqueeze(-2) if self.is_flat else tensor for tensor in self._qkv)

    def split(self, heads: int) -> None:
        """Set `q`, `k` and `v` to views ``(batch, tokens, heads, head_dim)``, with heads split off the batch axis."""
        self.q, self.k, self.v = (tensor.unflatten(0, (-1, heads)).transpose(1, 2) for tensor in self._qkv)

    def to_host_form(self, out: torch.Tensor) -> torch.Tensor:
        """Return an output in the form that the call's tensors had before `split`."""
        return out.transpose(1, 2).flatten(0, 1) if self.is_flat else out


class HeadsCall(AttentionCall):
    """A call of an attention function of ComfyUI, Forge or reForge: ``function(q, k, v, heads, mask=None, ...)``.

    Args:
        function: the host's function, or a callable that runs a host's override of it; both take the same arguments.
        q, k, v: tensors ``(batch, tokens, channels)``, or ``(batch, heads, tokens, head_dim)`` if ``skip_reshape``.
        heads: number of heads.
        mask: the call's attention mask, or None.
        attn_precision: dtype of the logits, passed on unless it is None; the next two are passed on if True.
        skip_reshape: True if the heads of q, k and v are an axis of their own.
        skip_output_reshape: the output is ``(batch, heads, tokens, head_dim)``, else ``(batch, tokens, channels)``.
        more: any other argument of the function, passed on; ``scale`` among them is the call's `scale`.
    """

    def __init__(self, function, q, k, v, heads, mask=None, attn_precision=None, skip_reshape=False,
                 skip_output_reshape=False, **more):  # fmt: skip
        self._function, self._qkv, self._heads, self._kwargs = function, (q, k, v), heads, more
        self._skip_reshape, self._skip_output_reshape = skip_reshape, skip_output_reshape
        options = {"attn_precision": attn_precision, "skip_reshape": skip_reshape,
                   "skip_output_reshape": skip_output_reshape}  # fmt: skip
        more.update((name, value) for name, value in options.items() if value)
        self.mask, self.scale = mask, more.get("scale")
        if skip_reshape:
            self.q, self.k, self.v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        else:
            width = q.shape[-1] // heads
            # reshape, because ComfyUI's SD3 passes values whose heads are already an axis of their own
            self.q = q.reshape(*q.shape[:2], -1, width)
            self.k, self.v = k.reshape(*k.shape[:2], -1, width), v.reshape(*v.shape[:2], -1, width)

    def unmerged(self) -> torch.Tensor:
        """Make the call as the host made it, on all tokens, and return what the host's function returns."""
        return self._function(*self._qkv, self._heads, mask=self.mask, **self._kwargs)

    def compute(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Call the host's function as `AttentionCall.compute` does; the host asks for its form by `skip_reshape`."""
        if self._skip_reshape:
            q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        else:
            q, k, v = q.flatten(2), k.flatten(2), v.flatten(2)
        out = self._function(q, k, v, self._heads, mask=bias, **self._kwargs)
        return out.transpose(1, 2) if self._skip_output_reshape else out.unflatten(-1, (self._heads, -1))

    def to_host_form(self, out: torch.Tensor) -> torch.Tensor:
        """Return an output as ``(batch, heads, tokens, head_dim)`` if `skip_output_reshape`, else with flat heads."""
        return out.transpose(1, 2) if self._skip_output_reshape else out.flatten(2)

    def key(self) -> tuple:
        """Return a tuple of the function, `skip_reshape`, `skip_output_reshape` and the number of heads."""
        return (self._function, self._skip_reshape, self._skip_output_reshape, self._heads)
