"""What is measured side by side: the control, the methods, and two bounds that no method can pass.

To add one: write a function that patches a UNet in place, and give it a line in `VARIANTS`. It gets a UNet of its
own, which shares its weights with the others', and never has to be undone.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

import tome_core
from benchmarks import reference
from benchmarks.networks import finest_blocks
from benchmarks.speed_plan import CALL, PICTURES, UNetCase
from tome_core.measuring.pays import Pays
from tome_core.models.unet_blocks import Place, find_blocks

Apply = Callable[[nn.Module], Any]
CONTROL = "vanilla"
NO_ATTENTION = "attention-free"
IDEAL = "ideal"
# of calls that are timed alone: between two near times a match is kept, between two far ones it is too old
_EARLY, _EARLY_NEAR, _EARLY_FAR = (900.0,), (900.0, 890.0), (900.0, 800.0)
_LATE, _LATE_NEAR, _LATE_FAR = (100.0,), (100.0, 90.0), (200.0, 100.0)
_LEAST_TILE = 32  # tokens a side: 256 pixels where the level is the latent's own


class SpeedVariant(NamedTuple):
    """A variant is something that is done to a UNet, and what of it is timed.

    apply: patches a UNet. meaning: for the reader of a table. bound: the variant that does the same for free.
    whats: the kinds of cases it is in. keeps: what is timed uses the match of a call before it, which runs untimed
    first; a compiled model matches anew in each call, so this is in no compiled case.
    """

    apply: Apply
    meaning: str
    bound: str | None = None
    whats: tuple[str, ...] = (CALL, *PICTURES)
    keeps: bool = False


def attend_half(attend: Callable, hidden_states: torch.Tensor, **named: object) -> torch.Tensor:
    """The first half of the tokens, attended, twice: merging that costs nothing but a slice and a cat."""
    tokens = hidden_states.shape[1]
    kept = tokens - tokens // 2
    attended = attend(hidden_states[:, :kept], **named)
    return torch.cat([attended, attended[:, : tokens - kept]], 1)


def attend_none(attend: Callable, hidden_states: torch.Tensor, **named: object) -> torch.Tensor:
    """The tokens as they are."""
    return hidden_states


def in_tiles(attend: Callable, hidden_states: torch.Tensor, **named: object) -> torch.Tensor:
    """HyperTile's idea: attention inside tiles of a square grid, as small as may be."""
    tiles = tiles_a_side(reference.square_side(hidden_states.shape[1], 1))
    return reference.join(attend(reference.in_tiles(hidden_states, tiles), **named), tiles)


def on_coarser_grid(attend: Callable, hidden_states: torch.Tensor, **named: object) -> torch.Tensor:
    """Token down-sampling (ToDo): a quarter of keys and values, those of every second row and column."""
    keys = reference.Coarse(hidden_states, 2).merge(hidden_states)
    return attend(hidden_states, **{**named, "encoder_hidden_states": keys})


def tiles_a_side(side: int) -> int:
    """How many tiles a grid of so many tokens a side is cut in; 1 where it is smaller than two tiles."""
    return max([1, *(tiles for tiles in range(2, side // _LEAST_TILE + 1) if side % tiles == 0)])


def _nothing(unet: nn.Module) -> None:
    """The control is the model as it is."""


def _tomesd(unet: nn.Module) -> None:
    # its default, 1, reaches nothing on SDXL, whose attention starts at half the latent
    finest = 2 ** finest_blocks(unet)[0].halvings
    importlib.import_module("tomesd").apply_patch(unet, ratio=0.5, max_downsample=finest)


def _preset(name: str, *times: float) -> Apply:
    """A preset. Calls that are timed alone are one picture's at these times in turn; at a single one, each another's
    first, which looks at its batch and so waits for the device.

    Who makes pictures tells the time with what is left at ``unet.tell_time``, as hosts do. Who makes calls alone asks
    ``unet.begin_calls`` for what to call before each, with the number of its pictures.
    """

    def apply(unet: nn.Module) -> None:
        handle = tome_core.patch(unet, name, host_clock=True)
        handle.pays = Pays((), (), always=True)  # whether it pays on this card is the question
        unet.tell_time = handle.set_time
        unet.begin_calls = lambda: _in_turn(handle, times)

    return apply


def _in_turn(handle: tome_core.Patch, times: Sequence[float]) -> Callable[[int], None]:
    turns, sampling = itertools.cycle(times), object()

    def tell(pictures: int) -> None:
        ours = sampling if len(times) > 1 else object()
        handle.set_time(timestep=next(turns), sampling=ours, pictures=pictures)

    return tell


def _in_place(forward: Callable, places: Callable[[nn.Module], Sequence[Place]] = finest_blocks) -> Apply:
    """In place of self-attentions: ``[B, N, C]`` to ``[B, N, C]``, given what was there."""
    def apply(unet: nn.Module) -> None:
        for place in places(unet):
            place.block.attn1.forward = partial(forward, place.block.attn1.forward)

    return apply


def _call(preset: str, times: Sequence[float], meaning: str, keeps: bool = False) -> SpeedVariant:
    return SpeedVariant(_preset(preset, *times), meaning, None, (CALL,), keeps)


VARIANTS: dict[str, SpeedVariant] = {
    CONTROL: SpeedVariant(_nothing, "the model as it is"),
    "tomesd": SpeedVariant(_tomesd, "tomesd 0.1.3, ratio 0.5 at the finest level", IDEAL),
    "downsample": SpeedVariant(
        _in_place(on_coarser_grid),
        "token down-sampling (ToDo): a quarter of keys and values at the finest level",
    ),
    "hypertile": SpeedVariant(
        _in_place(in_tiles),
        f"attention in tiles (HyperTile): {_LEAST_TILE} tokens a side, or the next larger that divide the finest grid",
    ),
    "ours": SpeedVariant(_preset("balanced"), "tome_core's preset balanced", None, PICTURES),
    "ours, early new": _call("balanced", _EARLY, "balanced in an early step that matches anew: a picture's first"),
    "ours, early renewed": _call("balanced", _EARLY_FAR, "balanced in an early step that renews an older match", True),
    "ours, early kept": _call("balanced", _EARLY_NEAR, "balanced in an early step that keeps a match", True),
    "ours, late new": _call("balanced", _LATE_FAR, "balanced in a late step that matches anew; none renews"),
    "ours, late kept": _call("balanced", _LATE_NEAR, "balanced in a late step that keeps a match", True),
    "ours, max": SpeedVariant(_preset("max"), "tome_core's preset max", None, PICTURES),
    "ours, max new": _call("max", _LATE, "max in a step that matches anew: a picture's first"),
    "ours, max renewed": _call("max", _LATE_FAR, "max in a step that renews an older match", True),
    "ours, max kept": _call("max", _LATE_NEAR, "max in a step that keeps a match", True),
    IDEAL: SpeedVariant(
        _in_place(attend_half), "bound: half of the tokens merged at the finest level, and merging costs nothing"
    ),
    NO_ATTENTION: SpeedVariant(
        _in_place(attend_none, find_blocks), "bound: every self-attention left out, at all levels"
    ),
}


# beside the control, its peers and the bounds: what cases show that are there for their batch or their attention
_FEW_OF_OURS = ("ours, late new", "ours, late kept")


def pick_for(case: UNetCase, names: Sequence[str]) -> list[str]:
    """Which of these variants a case compares."""
    found = [name for name in names if case.what in VARIANTS[name].whats]
    if case.what == CALL and not case.is_plain:
        others = [name for name in found if not name.startswith("ours")]
        found = [name for name in found if name in others or name in _FEW_OF_OURS]
    return [name for name in found if not (case.compiled and VARIANTS[name].keeps)]


def choose(wanted: Sequence[str]) -> list[str]:
    """The control, what is named, and of what is named all parts: ``ours`` stands for ``ours, late kept`` as well."""
    return [name for name in VARIANTS if name in (CONTROL, *wanted) or name.split(",")[0] in wanted]
