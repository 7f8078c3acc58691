"""Attentions that compute their scores by hand, instead of calling a function that takes q, k and v.

The module's own code runs on a `StandIn`, whose projections return given q, k and v. To support another attention, use
`ForwardOnStandIn` or derive a class from `AttentionDescription`, `register` it by the full name of the function that
computes the attention, and test it against attention over repeated keys, as ``tests/engine/attention/conformance.py``
does. Queries, keys and values are flat in this file, ``(batch, tokens, heads * head_dim)``, as projections return them.
"""

from __future__ import annotations

import re
from functools import partial
from types import MethodType
from typing import Any

from torch import Tensor, nn

Kwargs = dict[str, Any]  # the keyword arguments of a call except for its tokens (``x``, context and value)
_NO_OUTPUT_PROJECTION = nn.Sequential(nn.Identity(), nn.Identity())  # a projection and a dropout that do nothing


class AttentionDescription:
    """The base class of descriptions: how to run one kind of attention on given queries, keys and values.

    A description has no state, so one object serves every module of its kind. If `problem` returns None, the caller
    projects queries by ``module.to_q``, takes `keys_and_values`, merges, and uses `attend` and then `finish`.

    Attributes:
        by_attribute: True if the logits are multiplied by ``module.scale``, False if by ``head_dim ** -0.5``.
        adds_bias: True if `attend` adds a bias to the logits; False: it is called with None as bias only.
    """

    by_attribute = adds_bias = False

    def problem(self, module: nn.Module, kwargs: Kwargs) -> str | None:
        """Return why the description does not fit a call, as text for the report; None if it fits, always here."""
        return None

    def keys_and_values(self, module: nn.Module, keys: Tensor, values: Tensor, kwargs: Kwargs) -> tuple[Tensor, Tensor]:
        """Return tokens `keys` projected by ``module.to_k``, tokens `values` by ``module.to_v``."""
        return module.to_k(keys), module.to_v(values)

    def scale(self, module: nn.Module, width: int) -> float:
        """Return the logits' factor: ``module.scale`` if `by_attribute`, else ``width**-0.5`` of a head's `width`."""
        return float(module.scale) if self.by_attribute else width**-0.5

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, kwargs: Kwargs) -> Tensor:
        """Compute ``softmax(scale q k^T + bias) v`` with the module's own code, without the output projection.

        `q`, `k`, `v` and the result are flat, ``(batch, tokens, heads * head_dim)``, the bias is ``(batch, 1, keys)``
        in the dtype of `q`, or None. The base class raises a NotImplementedError.
        """
        raise NotImplementedError

    def finish(self, module: nn.Module, out: Tensor) -> Tensor:
        """Apply the module's output projection to the result of `attend`, ``(batch, tokens, heads * head_dim)``."""
        return module.to_out(out)


class StandIn:
    """A stand-in for an attention module, to run the module's own code on given queries, keys and values.

    Its projections return the given tensors, its output projection returns its input, and its ``dim_head`` is the width
    of a head of q. Every other attribute is read from the module, and the module's methods run on the stand-in.
    """

    def __init__(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> None:
        self._module = module
        self.to_q, self.to_k, self.to_v = (lambda *_, tensor=tensor, **__: tensor for tensor in (q, k, v))
        self.to_out = _NO_OUTPUT_PROJECTION
        self.dim_head = q.shape[-1] // module.heads  # some forwards use this width to split heads

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        if isinstance(value, MethodType) and value.__self__ is self._module:
            return partial(value.__func__, self)
        return value


class ForwardOnStandIn(AttentionDescription):
    """The description of an attention that is computed in ``forward(x, context=...)``, which runs on a `StandIn`.

    `adds_bias` is False unless a subclass changes it, because such a forward may take a mask for a boolean one.
    """

    def __init__(self, by_attribute: bool) -> None:
        self.by_attribute = by_attribute

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, kwargs: Kwargs) -> Tensor:
        """Run ``forward`` on a `StandIn`, with ``mask``, ``(batch, 1, 1, keys)``, only for a bias, and no `kwargs`."""
        mask = {} if bias is None else {"mask": bias[:, None]}
        return type(module).forward(StandIn(module, q, k, v), q, context=k, **mask)


class _Processor(AttentionDescription):
    """The description of diffusers' processors that let their module compute the scores. They run on a `StandIn`."""

    by_attribute = adds_bias = True

    def problem(self, module: nn.Module, kwargs: Kwargs) -> str | None:
        """Return a reason for a group, spatial or cross norm, an output scale or a residual connection, else None."""
        norms = module.group_norm is not None or module.spatial_norm is not None or module.norm_cross is not None
        has_more = norms or module.residual_connection or module.rescale_output_factor != 1.0
        return "it has a norm, an output scale or a residual connection" if has_more else None

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, kwargs: Kwargs) -> Tensor:
        """Run the processor on q, k, v. If ``module.upcast_attention``, scores are float32, so the bias is too."""
        mask = bias.float() if bias is not None and module.upcast_attention else bias
        return module.processor(StandIn(module, q, k, v), q, encoder_hidden_states=k, attention_mask=mask)

    def finish(self, module: nn.Module, out: Tensor) -> Tensor:
        """Apply the output projection and the dropout of the module to the result of `attend`."""
        projection, dropout = module.to_out
        return dropout(projection(out))


OF_PROCESSORS = "diffusers.models.attention_processor.Attention.forward"  # only calls the module's processor
_ENTRIES: dict[str, AttentionDescription] = {}


def register(function: str, entry: AttentionDescription) -> None:
    """Register a description by `full_name` of a ``forward`` or a processor's ``__call__``; replace an earlier one."""
    _ENTRIES[function] = entry


def description_of(function: Any) -> AttentionDescription | None:
    """Return the description that is registered under `full_name` of a function; None if there is none."""
    return _ENTRIES.get(full_name(function))


def full_name(function: Any) -> str:
    """Return ``module.qualified_name`` of a function, of the function in a `partial` or, for an object, of its class.

    A decorated function gives ``"<module>.<name> around <full name of the function that it wraps>"``: module and name,
    not qualified, are those of the decorator's inner function. Of a module whose name is a path, as ComfyUI names its
    packs, the last folder and what follows is given.
    """
    function = function.func if isinstance(function, partial) else function
    if hasattr(function, "__wrapped__") and hasattr(function, "__code__"):
        wrapper = f"{_without_folders(function.__globals__['__name__'])}.{function.__code__.co_name}"
        return f"{wrapper} around {full_name(function.__wrapped__)}"
    function = function if hasattr(function, "__qualname__") else type(function)
    return f"{_without_folders(getattr(function, '__module__', ''))}.{function.__qualname__}"


def name_of_patch(function: Any) -> str:
    """Return `full_name` without the names inside a function: ``nodes_hypertile.HyperTile.execute``, of a closure."""
    return full_name(function).partition(".<locals>")[0]


def _without_folders(name: str | None) -> str:
    """Return a module's name after its last slash: ComfyUI names its packs by paths. "" for None."""
    return re.split(r"[/\\]", name or "")[-1]


# Full names, because a class of the same name may compute another thing. CompVis' attention uses einsum, its two
# variants call xformers.
register("ldm.modules.attention.CrossAttention.forward", ForwardOnStandIn(by_attribute=True))
for _name in ("AttnProcessor", "SlicedAttnProcessor"):
    register(f"diffusers.models.attention_processor.{_name}.__call__", _Processor())
