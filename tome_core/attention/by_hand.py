"""Attentions that compute their scores by hand, instead of calling a function that takes q, k and v.

The module's own code is run on a `StandIn`, whose projections give the q, k and v that were made before, so nothing
that a host computes is computed again here. To describe one more: take `ForwardOnStandIn`, or derive from `ByHand`;
`register` it by the full name of the function that computes; hold it against attention over repeated keys, as
``tests/conformance.py`` does.

Queries, keys and values are flat in this file, ``[B, N, H*d]``, as projections make them.
"""

from __future__ import annotations

from functools import partial
from types import MethodType
from typing import Any

from torch import Tensor, nn

Kwargs = dict[str, Any]  # what a call was given besides its tokens (``x``, context and value)
_AS_IT_IS = nn.Sequential(nn.Identity(), nn.Identity())  # a projection and a dropout that do nothing


class ByHand:
    """One kind of attention. Without state: one object serves every module of its kind.

    by_attribute: it multiplies by ``module.scale``, not by the width of a head to the power -1/2. adds_bias: `attend`
    adds a bias to the logits.
    """

    by_attribute = adds_bias = False

    def problem(self, module: nn.Module, kwargs: Kwargs) -> str | None:
        """Why this very call is not what is known; None if it is."""
        return None

    def keys_and_values(self, module: nn.Module, keys: Tensor, values: Tensor, kwargs: Kwargs) -> tuple[Tensor, Tensor]:
        """k and v ``[B, N, H*d]`` of ``keys`` and ``values [B, N, C]``, by the module's own projections."""
        return module.to_k(keys), module.to_v(values)

    def scale(self, module: nn.Module, width: int) -> float:
        """What `attend` multiplies ``q k^T`` with. width: of a head."""
        return float(module.scale) if self.by_attribute else width**-0.5

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, kwargs: Kwargs) -> Tensor:
        """``softmax(scale q k^T + bias) v`` by the module's own code. bias: ``[B, 1, G]`` in the dtype of ``q``."""
        raise NotImplementedError

    def finish(self, module: nn.Module, out: Tensor) -> Tensor:
        """What follows: the output projection."""
        return module.to_out(out)


class StandIn:
    """Stands in for an attention module inside its own code: projections give the queries, keys and values that were
    made before, the output projection gives back what it gets, and everything else is the module's.
    """

    def __init__(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> None:
        self._module = module
        self.to_q, self.to_k, self.to_v = (lambda *_, made=made, **__: made for made in (q, k, v))
        self.to_out = _AS_IT_IS
        self.dim_head = q.shape[-1] // module.heads  # what some forwards cut their heads by

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._module, name)
        if isinstance(found, MethodType) and found.__self__ is self._module:
            return partial(found.__func__, self)
        return found


class ForwardOnStandIn(ByHand):
    """An attention that lies inside one ``forward(x, context=...)``: that very function is run on a `StandIn`."""

    def __init__(self, by_attribute: bool) -> None:
        self.by_attribute = by_attribute

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, kwargs: Kwargs) -> Tensor:
        """What the module's ``forward`` makes of them; a bias, of those that take one, is its mask ``[B, 1, 1, G]``."""
        mask = {} if bias is None else {"mask": bias[:, None]}
        return type(module).forward(StandIn(module, q, k, v), q, context=k, **mask)


class _Processor(ByHand):
    """diffusers' processors that take the scores from the module: the processor itself is run on a `StandIn`."""

    by_attribute = adds_bias = True

    def problem(self, module: nn.Module, kwargs: Kwargs) -> str | None:
        """Norms and residual connections, which attentions outside of transformer blocks have."""
        norms = module.group_norm is not None or module.spatial_norm is not None or module.norm_cross is not None
        more = norms or module.residual_connection or module.rescale_output_factor != 1.0
        return "it norms, scales or adds its input" if more else None

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, kwargs: Kwargs) -> Tensor:
        mask = bias.float() if bias is not None and module.upcast_attention else bias
        return module.processor(StandIn(module, q, k, v), q, encoder_hidden_states=k, attention_mask=mask)

    def finish(self, module: nn.Module, out: Tensor) -> Tensor:
        projection, dropout = module.to_out
        return dropout(projection(out))


OF_PROCESSORS = "diffusers.models.attention_processor.Attention.forward"  # leaves everything to its processor
_ENTRIES: dict[str, ByHand] = {}


def register(function: str, entry: ByHand) -> None:
    """Make an attention known.

    Args:
        function: full name of the function that is ``type(module).forward``, or the ``__call__`` of its processor.
        entry: the description; a second entry for a name replaces the first.
    """
    _ENTRIES[function] = entry


def known_of(function: Any) -> ByHand | None:
    """The description of what this function computes; None if there is none."""
    return _ENTRIES.get(full_name(function))


def full_name(function: Any) -> str:
    """Module and qualified name of a function, of a decorator's own: what it wraps is another one."""
    function = function.func if isinstance(function, partial) else function
    if hasattr(function, "__wrapped__") and hasattr(function, "__code__"):
        own = f"{function.__globals__['__name__']}.{function.__code__.co_name}"
        return f"{own} around {full_name(function.__wrapped__)}"
    function = function if hasattr(function, "__qualname__") else type(function)
    return f"{getattr(function, '__module__', '')}.{function.__qualname__}"


# A class of the same name is no proof, so these are full names. CompVis' attention is einsum, two others call xformers.
register("ldm.modules.attention.CrossAttention.forward", ForwardOnStandIn(by_attribute=True))
for _name in ("AttnProcessor", "SlicedAttnProcessor"):
    register(f"diffusers.models.attention_processor.{_name}.__call__", _Processor())
