"""How much of the finest self-attention is left, counted where every method has to pass: at its projections."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.reference_patch import finest


class AttentionWork:
    """A context manager that counts queries times keys of the finest self-attention, whatever has patched the UNet.

    full: of all tokens that reached the blocks; left: of those that were attended. Both grow with every call inside
    it. May be entered again.
    """

    def __init__(self, unet: nn.Module) -> None:
        self.blocks = [place.block for place in finest(unet)]
        self.full = self.left = 0
        self._hooks: list = []

    def __enter__(self) -> AttentionWork:
        for block in self.blocks:
            counts: dict[str, int] = {}
            attention = block.attn1
            self._hooks += [
                block.register_forward_pre_hook(self._add_full),
                attention.to_q.register_forward_hook(_noting(counts, "queries")),
                # a method that compares keys calls this before the attention does; the last call is the attention's
                attention.to_k.register_forward_hook(_noting(counts, "keys")),
                attention.to_out[0].register_forward_hook(self._adding(counts)),
            ]
        return self

    def __exit__(self, *error: object) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def share(self) -> float:
        """Work left, as a share of the whole, since the last call of this method."""
        share = self.left / self.full
        self.full = self.left = 0
        return share

    def _add_full(self, block: nn.Module, args: tuple) -> None:
        self.full += args[0].shape[0] * args[0].shape[1] ** 2

    def _adding(self, counts: dict[str, int]):
        def hook(module: nn.Module, args: tuple, out: torch.Tensor) -> None:
            self.left += out.shape[0] * counts["queries"] * counts["keys"]

        return hook


def _noting(counts: dict[str, int], name: str):
    def hook(module: nn.Module, args: tuple, out: torch.Tensor) -> None:
        counts[name] = out.shape[1]

    return hook
