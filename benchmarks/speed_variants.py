"""What is measured side by side: the control, the methods, and two bounds that no method can pass.

To add one: write a function that patches a UNet in place, and give it a line in `VARIANTS`. It gets a UNet of its
own, which shares its weights with the others', and never has to be undone.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

import tome_core
from tome_core.families import Place, find_blocks

CONTROL = "vanilla"
NO_ATTENTION = "attention-free"
IDEAL = "ideal"
_EARLY, _LATE = 900.0, 100.0
_ANEW = "matches anew (within a picture a match serves several steps)"


class Variant(NamedTuple):
    """apply: patches a UNet. meaning: for the reader of a table. bound: the variant that does the same for free.

    calls_only: a picture would show nothing that another variant does not show.
    """

    apply: Callable[[nn.Module], None]
    meaning: str
    bound: str | None = None
    calls_only: bool = False


def finest_blocks(unet: nn.Module) -> list[Place]:
    """The transformer blocks of the finest level that has attention."""
    places = find_blocks(unet)
    finest = min(place.halvings for place in places)
    return [place for place in places if place.halvings == finest]


class FreeMerge(nn.Module):
    """Attention on half of the tokens, with a match, a merge and an unmerge that cost nothing but a slice and a cat."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, hidden_states: torch.Tensor, **named: object) -> torch.Tensor:
        """``[B, N, C]`` to ``[B, N, C]``."""
        tokens = hidden_states.shape[1]
        kept = tokens - tokens // 2
        attended = self.attention(hidden_states[:, :kept], **named)
        return torch.cat([attended, attended[:, : tokens - kept]], 1)


class NoAttention(nn.Module):
    """In place of attention: nothing."""

    def forward(self, hidden_states: torch.Tensor, **named: object) -> torch.Tensor:
        """Returns its input."""
        return hidden_states


def _nothing(unet: nn.Module) -> None:
    """The control is the model as it is."""


def _tomesd(unet: nn.Module) -> None:
    # its default, 1, reaches nothing on SDXL, whose attention starts at half the latent
    finest = 2 ** finest_blocks(unet)[0].halvings
    importlib.import_module("tomesd").apply_patch(unet, ratio=0.5, max_downsample=finest)


def _ours(**settings: object) -> Callable[[nn.Module], None]:
    def apply(unet: nn.Module) -> None:
        tome_core.patch(unet, tome_core.MergeConfig(**settings))

    return apply


def _preset(name: str, timestep: float) -> Callable[[nn.Module], None]:
    """A preset. A call of the UNet is at this time, and matches anew.

    Who makes pictures tells the time with what is left at ``unet.tell_time``, as hosts do. Who makes one call alone
    says so with ``unet.begin_picture``, and of how many pictures it is.
    """

    def apply(unet: nn.Module) -> None:
        handle = tome_core.patch(unet, name, host_clock=True)
        handle.set_time(timestep=timestep)
        unet.tell_time = handle.set_time
        unet.begin_picture = lambda pictures: handle.set_time(timestep=timestep, sampling=object(), pictures=pictures)

    return apply


def _free_merge(unet: nn.Module) -> None:
    for place in finest_blocks(unet):
        place.block.attn1 = FreeMerge(place.block.attn1)


def _no_attention(unet: nn.Module) -> None:
    for place in find_blocks(unet):
        place.block.attn1 = NoAttention()


VARIANTS: dict[str, Variant] = {
    CONTROL: Variant(_nothing, "the model as it is"),
    "tomesd": Variant(_tomesd, "tomesd 0.1.3, ratio 0.5 at the finest level", IDEAL),
    "downsample": Variant(
        _ours(method="downsample"), "token down-sampling (ToDo): a quarter of keys and values at the finest level"
    ),
    "ours": Variant(_preset("balanced", _LATE), f"tome_core's preset balanced; in calls a late step, which {_ANEW}"),
    "ours, early": Variant(_preset("balanced", _EARLY), "the same in an early step", None, True),
    "ours, max": Variant(_preset("max", _LATE), "tome_core's preset max, as above"),
    IDEAL: Variant(_free_merge, "bound: half of the tokens merged at the finest level, and merging costs nothing"),
    NO_ATTENTION: Variant(_no_attention, "bound: every self-attention left out, at all levels"),
}


def missing_package(names: list[str]) -> str | None:
    """The package that one of these variants needs and that is not installed."""
    return "tomesd" if "tomesd" in names and importlib.util.find_spec("tomesd") is None else None
