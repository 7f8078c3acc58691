"""Wraps around whole blocks that stay outside of compiled code, so that a compiled block may run on merged tokens.

``block.compile()``, which diffusers' `compile_repeated_blocks` calls for each block, puts compiled code into an
attribute of the block. Its wrap goes around that code. The code then sees two sizes of tokens, for which a compiler
makes one graph for any size, and nothing else of the merging.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from ..engine.merged_tokens import whole
from . import compiled
from .wrap import Wrap, wrap_of

CODE = "_compiled_call_impl"  # the attribute of torch's modules; None if the module is not compiled


class OuterWrap(Wrap):
    """A wrap around a block's own compiled code, or, while it has none, around its method `uncompiled`; "": not at all.

    `name` is `CODE` while it is around compiled code. Then use `call_code` instead of `original`.
    """

    def __init__(self, block: nn.Module, uncompiled: str) -> None:
        super().__init__(block, uncompiled)
        self.uncompiled = uncompiled

    def call_code(self, *args: Any, **kwargs: Any) -> Any:
        """Call the compiled code with plain tensors, because a compiler cannot read `LazyTokens`."""
        return self.original(*map(whole, args), **{name: whole(value) for name, value in kwargs.items()})

    def _code(self) -> Any:
        """Return the block's compiled code; None if it has none, or if this torch's compiler was not tried."""
        return vars(self.wrapped()).get(CODE) if compiled.TRIED else None

    def has_to_move(self) -> bool:
        """Tell whether the block has been compiled since the wrap was installed, or is no longer compiled."""
        code = self._code()
        return (code is None) == (self.name == CODE) or (code is not None and wrap_of(code) is not self)

    def install(self) -> Wrap:
        """Put the wrap around the compiled code if there is any, and return it, or a copy if it had to move."""
        wrap, name = self, self.uncompiled if self._code() is None else CODE
        if name != self.name:  # other programs may still call this wrap, where it was
            self.uninstall()
            wrap = self._new_wrap()
            wrap.name, wrap.beneath, wrap._placed = name, None, False
        return Wrap.install(wrap) if name else wrap


class WholeTokensWrap(OuterWrap):
    """The wrap around the compiled code of a block that keeps all tokens; without such code it is not installed."""

    def __init__(self, block: nn.Module, wraps: Any) -> None:
        super().__init__(block, "")

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Return the block's output."""
        return self.call_code(*args, **kwargs)
