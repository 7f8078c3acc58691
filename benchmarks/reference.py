"""Ways to group tokens, as plain as they can be written: the variants the engine does not have, and those it has.

For measuring quality, not speed: score matrices exist as a whole, nothing is reused, nothing is compiled. Where the
engine has the same method, tests hold the two against each other. Letters as in `tome_core.merging.plan`: ``B`` batch,
``N`` tokens, ``G`` groups, ``C`` channels. Grids are square.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F


class Groups:
    """A map from tokens to groups. ``group``: int64 ``[B, N]`` with values below ``count``; ``sizes``: ``[B, G]``."""

    def __init__(self, group: torch.Tensor, count: int) -> None:
        self.group, self.count = group, count
        ones = torch.ones(group.shape, device=group.device)
        self.sizes = torch.zeros(group.shape[0], count, device=group.device).scatter_add_(1, group, ones)

    def merge(self, x: torch.Tensor) -> torch.Tensor:
        """The mean of each group: ``[B, N, C]`` to ``[B, G, C]``; an empty group gives zeros."""
        total = x.new_zeros(x.shape[0], self.count, x.shape[2])
        total.scatter_add_(1, self.group[..., None].expand_as(x), x)
        return total / self.sizes[..., None].clamp(min=1).to(x.dtype)

    def unmerge(self, y: torch.Tensor) -> torch.Tensor:
        """Every token gets its group's row: ``[B, G, C]`` to ``[B, N, C]``."""
        return y.gather(1, self.group[..., None].expand(-1, -1, y.shape[2]))

    def log_sizes(self) -> torch.Tensor:
        """What each group's key adds to its logit: ``[B, G]``; minus infinity for an empty group."""
        return self.sizes.log()


def bipartite(
    x: torch.Tensor,
    ratio: float,
    cell: int = 2,
    *,
    euclid: bool = False,
    window: int | None = None,
    destinations_from: torch.Generator | None = None,
    partners_from: torch.Generator | None = None,
) -> Groups:
    """ToMe's matching (arXiv 2303.17604): the ``ratio`` of all tokens that have the most similar partners merge.

    x: ``[B, N, C]``, compared by cosine, or by distance where `euclid`. cell: one token of every ``cell x cell``
    square is a destination, its top left one or one drawn with `destinations_from`. window: partners only inside the
    same ``window x window`` square. partners_from: partners, and who merges, by lot: the control, which ignores `x`.
    """
    batch, tokens, _ = x.shape
    destinations = _one_per_cell(tokens, cell, destinations_from).to(x.device)
    is_source = torch.ones(tokens, dtype=torch.bool, device=x.device)
    is_source[destinations] = False
    sources = torch.arange(tokens, device=x.device)[is_source]
    if partners_from is not None:
        lots = torch.rand(batch, len(sources), len(destinations), generator=partners_from)
        score = lots.to(x.device)
    else:
        score = _likeness(x[:, sources].float(), x[:, destinations].float(), euclid)
    if window:
        place = _square_of(tokens, window).to(x.device)
        score = score.masked_fill(place[sources][:, None] != place[destinations][None], -math.inf)
    return _most_similar_merge(score, sources, destinations, int(tokens * ratio))


def _most_similar_merge(
    score: torch.Tensor, sources: torch.Tensor, destinations: torch.Tensor, removed: int
) -> Groups:
    batch, count, num_destinations = score.shape
    removed = min(removed, count)
    best, partner = score.max(-1)
    order = best.argsort(dim=-1, descending=True, stable=True)
    merged, alone = order[:, :removed], order[:, removed:]
    numbers = torch.arange(num_destinations + count - removed, device=score.device)
    of_source = torch.empty(batch, count, dtype=torch.int64, device=score.device)
    of_source.scatter_(1, merged, partner.gather(1, merged))
    of_source.scatter_(1, alone, numbers[num_destinations:].expand(batch, -1))
    group = torch.empty(batch, count + num_destinations, dtype=torch.int64, device=score.device)
    group[:, destinations] = numbers[:num_destinations]
    group[:, sources] = of_source
    return Groups(group, len(numbers))


def pooled(x: torch.Tensor, cell: int) -> Groups:
    """Every ``cell x cell`` square is a group, whatever is in it; only the shape of `x` matters."""
    square = _square_of(x.shape[1], cell).to(x.device)
    return Groups(square.expand(x.shape[0], -1), int(square.max()) + 1)


def refined(groups: Groups, x: torch.Tensor, steps: int, *, euclid: bool = False) -> Groups:
    """`steps` of Lloyd's algorithm (k-means) that start from `groups`; tokens are compared as in `bipartite`.

    A group that loses all of its tokens stays empty: its key gets no weight where sizes count.
    """
    x = x.float() if euclid else F.normalize(x.float(), dim=-1)
    for _ in range(steps):
        score = _likeness(x, groups.merge(x), euclid)
        groups = Groups(score.masked_fill((groups.sizes == 0)[:, None], -math.inf).argmax(-1), groups.count)
    return groups


def _likeness(a: torch.Tensor, b: torch.Tensor, euclid: bool) -> torch.Tensor:
    """How alike the rows of ``[B, M, C]`` and ``[B, K, C]`` are: ``[B, M, K]``, the higher the more."""
    if euclid:
        return -torch.cdist(a, b)
    return F.normalize(a, dim=-1) @ F.normalize(b, dim=-1).transpose(1, 2)


def square_side(tokens: int, cell: int) -> int:
    """Tokens a side of a square grid. Raises ValueError where it is none, or `cell` does not divide it."""
    side = math.isqrt(tokens)
    if side * side != tokens or side % cell:
        raise ValueError(f"{tokens} tokens are no square grid that cells of {cell}x{cell} divide; the reference code "
                         "measures square pictures only")
    return side


def _square_of(tokens: int, cell: int) -> torch.Tensor:
    """The number of the ``cell x cell`` square each token is in: int64 ``[N]``."""
    side = square_side(tokens, cell)
    line = torch.arange(side) // cell
    return (line[:, None] * (side // cell) + line[None]).reshape(-1)


def _one_per_cell(tokens: int, cell: int, draw: torch.Generator | None) -> torch.Tensor:
    members = _square_of(tokens, cell).argsort(stable=True).view(-1, cell * cell)
    if draw is None:
        return members[:, 0]
    return members.gather(1, torch.randint(cell * cell, (len(members), 1), generator=draw))[:, 0]
