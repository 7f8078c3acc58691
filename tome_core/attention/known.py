"""What is known of an attention's inside: how it makes q, k and v, what it computes with them, and what follows.

Letters: ``B`` batch, ``N`` queries, ``G`` keys, ``H`` heads. Queries, keys and values are flat here, ``[B, N, H*d]``,
as projections make them and as most hosts' functions take them.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import MethodType
from typing import Any, NamedTuple

from torch import Tensor, nn

Kwargs = dict[str, Any]  # what a call was given besides its tokens (``x``, context and value)


class KnownAttention:
    """One kind of attention. Without state: one object serves every module of its kind.

    by_attribute: it multiplies by ``module.scale`` however wide the heads are, not by their width to the power -1/2.
    adds_bias: see `takes_bias`.
    """

    by_attribute = adds_bias = False

    def problem(self, module: nn.Module, kwargs: Kwargs) -> str | None:
        """Why this very call is not what is known; None where it is."""
        return None

    def heads(self, module: nn.Module) -> int:
        """Number of heads ``H``."""
        return module.heads

    def queries(self, module: nn.Module, x: Tensor, kwargs: Kwargs) -> Tensor:
        """q ``[B, N, H*d]`` of ``x [B, N, C]``, by the module's own projection, whatever was put on it (LoRA, ...)."""
        return module.to_q(x)

    def keys_and_values(self, module: nn.Module, keys: Tensor, values: Tensor, kwargs: Kwargs) -> tuple[Tensor, Tensor]:
        """k and v ``[B, G, H*d]`` of ``keys`` and ``values [B, G, C]``, likewise."""
        return module.to_k(keys), module.to_v(values)

    def scale(self, module: nn.Module, width: int) -> float:
        """What `attend` multiplies ``q k^T`` with where heads are this wide."""
        return float(module.scale) if self.by_attribute else width**-0.5

    def takes_bias(self, module: nn.Module, q: Tensor, k: Tensor, kwargs: Kwargs) -> bool:
        """Does `attend` add a bias to the logits, without a detour? Where not, heads are widened instead."""
        return self.adds_bias

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, kwargs: Kwargs) -> Tensor:
        """``softmax(scale q k^T + bias) v``, flat, by the function that would have been called without merging.

        bias: ``[B, 1, G]`` in the dtype of ``q``, or None. Heads may be wider than the module's own.
        """
        raise NotImplementedError

    def finish(self, module: nn.Module, out: Tensor) -> Tensor:
        """What follows: the output projection."""
        return module.to_out(out)


class LeftAlone(NamedTuple):
    """One kind of attention in which nothing may be merged. why: it cannot be, as a sentence about it goes on."""

    why: str


class StandIn:
    """Stands in for an attention module inside its own ``forward``: projections give the queries, keys and values that
    were made before, the output projection gives back what it gets, and everything else is the module's.
    """

    def __init__(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> None:
        self._module = module
        self.to_q, self.to_k, self.to_v = _Given(q), _Given(k), _Given(v)
        self.to_out = _AsItIs()
        self.dim_head = q.shape[-1] // module.heads  # what some forwards cut their heads by

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._module, name)
        if isinstance(found, MethodType) and found.__self__ is self._module:
            return partial(found.__func__, self)  # which a compiler can follow
        return found


class _Given:
    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def __call__(self, *_: Any, **__: Any) -> Tensor:
        return self._tensor


class _AsItIs:
    """A module, or a sequence of a projection and a dropout, that does nothing."""

    def __call__(self, x: Tensor, *_: Any, **__: Any) -> Tensor:
        return x

    def __iter__(self) -> Iterator[_AsItIs]:
        return iter((self, self))

    def __getitem__(self, place: int) -> _AsItIs:
        return self

    def __len__(self) -> int:
        return 2


class ForwardOnStandIn(KnownAttention):
    """An attention that lies inside one ``forward(x, context=...)``: that very function is run on a `StandIn`."""

    def __init__(self, by_attribute: bool) -> None:
        self.by_attribute = by_attribute

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, kwargs: Kwargs) -> Tensor:
        """What the module's ``forward`` makes of them; a bias, of those that take one, is its mask ``[B, 1, 1, G]``."""
        mask = {} if bias is None else {"mask": bias[:, None]}
        return type(module).forward(StandIn(module, q, k, v), q, context=k, **mask)
