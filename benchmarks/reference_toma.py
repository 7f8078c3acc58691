"""ToMA (arXiv 2509.10918) in plain code on a Flux transformer: fewer tokens through each attention, chosen in tiles.

As we read the paper's abstract; its code may differ: a subset of the tokens that represents all others best (facility
location, greedy), in tiles of the picture; merging as an attention of that subset to all tokens; each token then
takes from the subset as it gave. The authors make this anew every few steps and for several blocks together; here
each block does, which errs less.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks import reference_tiles
from benchmarks.networks import answered
from tome_core.transformers.families import family_of, find_attentions

TILES = 8  # a side
SHARPNESS = 10.0  # of the weights over cosines


class Merge:
    """Of the tokens ``[B, N, C]`` of square pictures. chosen: int64 ``[B, M]``, the subset's places."""

    def __init__(self, x: torch.Tensor, ratio: float) -> None:
        unit = F.normalize(reference_tiles.split(x, TILES), dim=-1)
        alike = unit @ unit.transpose(1, 2)
        chosen = representatives(alike, round(alike.shape[1] * (1 - ratio)))
        rows = alike.gather(1, chosen[..., None].expand(-1, -1, alike.shape[2]))
        self._given = (SHARPNESS * rows).softmax(1)  # [tiles, M, n]: how each token divides itself
        places = torch.arange(x.shape[1], device=x.device)[None, :, None]
        inside = reference_tiles.split(places, TILES)[..., 0].repeat(len(x), 1)
        self.chosen = inside.gather(1, chosen).view(len(x), -1)

    def merge(self, x: torch.Tensor) -> torch.Tensor:
        """``[B, N, C]`` to ``[B, M, C]``, in the order of `chosen`."""
        weights = self._given / self._given.sum(2, keepdim=True)
        return (weights.to(x.dtype) @ reference_tiles.split(x, TILES)).view(len(x), -1, x.shape[2])

    def unmerge(self, y: torch.Tensor) -> torch.Tensor:
        """``[B, M, C]`` to ``[B, N, C]``."""
        by_tile = y.reshape(len(self._given), -1, y.shape[2])
        return reference_tiles.join(self._given.transpose(1, 2).to(y.dtype) @ by_tile, TILES)


def representatives(alike: torch.Tensor, count: int) -> torch.Tensor:
    """int64 ``[T, count]``: of each set of tokens those with the highest sum of every token's likeness to the nearest.

    One after the other, each the one that adds the most. alike: ``[T, n, n]``.
    """
    covered = torch.full_like(alike[:, 0], -1.0)
    chosen: list[torch.Tensor] = []
    taken = torch.zeros_like(covered)
    for _ in range(count):
        gain = (alike - covered[:, None]).clamp(min=0).sum(2) - taken
        best = gain.argmax(1, keepdim=True)
        taken = taken.scatter(1, best, float("inf"))
        covered = torch.maximum(covered, alike.gather(1, best[..., None].expand(-1, -1, alike.shape[2]))[:, 0])
        chosen.append(best)
    return torch.cat(chosen, 1)


@contextmanager
def toma(transformer: nn.Module, ratio: float) -> Iterator[None]:
    """Inside it the attentions of a Flux transformer see 1 - ratio of the picture's tokens."""
    tokens = [0]  # of the picture, at the latest call

    def look(transformer: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        tokens[0] = kwargs["hidden_states"].shape[1]

    found = [one for _, one in find_attentions(transformer, family_of(transformer))]
    forwards = {one: partial(_attend, one.forward, ratio, tokens) for one in found}
    with transformer.register_forward_pre_hook(look, with_kwargs=True), answered(forwards):
        yield


def _attend(
    own: Any, ratio: float, tokens: list[int], hidden_states: torch.Tensor,
    encoder_hidden_states: torch.Tensor | None = None,
    image_rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None, **more: Any,
) -> Any:  # fmt: skip
    """In place of one attention's ``forward``, `own`; picture by picture, because positions are the whole batch's."""
    text = hidden_states.shape[1] - tokens[0]  # in one sequence with the picture, or apart
    merge = Merge(hidden_states[:, text:], ratio)
    x = torch.cat([hidden_states[:, :text], merge.merge(hidden_states[:, text:])], 1)
    words = image_rotary_emb[0].shape[0] - tokens[0]
    found = []
    for number in range(len(x)):
        places = torch.cat([torch.arange(words, device=x.device), merge.chosen[number] + words])
        row = slice(number, number + 1)
        beside = None if encoder_hidden_states is None else encoder_hidden_states[row]
        found.append(own(x[row], beside, image_rotary_emb=tuple(one[places] for one in image_rotary_emb), **more))
    if encoder_hidden_states is None:
        out = torch.cat(found)
        return torch.cat([out[:, :text], merge.unmerge(out[:, text:])], 1)
    out, *others = (torch.cat(one) for one in zip(*found, strict=True))
    return merge.unmerge(out), *others
