"""Slow, obvious versions of what the engine does fast: loops over tokens, no cleverness."""

from __future__ import annotations

import torch


def mean_by_group(x: torch.Tensor, group: torch.Tensor, num_groups: int) -> torch.Tensor:
    """``[B, N, C]`` float64 and ``[B, N]`` -> ``[B, G, C]``; an empty group is zero."""
    out = torch.zeros(x.shape[0], num_groups, x.shape[2], dtype=torch.float64)
    for sample in range(x.shape[0]):
        for number in range(num_groups):
            members = [x[sample, i].double() for i in range(x.shape[1]) if group[sample, i] == number]
            if members:
                out[sample, number] = torch.stack(members).mean(0)
    return out


def bipartite_similarities(x: torch.Tensor, height: int, width: int, sy: int, sx: int) -> list[list[float]]:
    """For each sample the best cosine of every source to a top-left destination, highest first, in float64."""
    cell_rows, cell_columns = max(1, height // sy), max(1, width // sx)
    destinations = [r * sy * width + c * sx for r in range(cell_rows) for c in range(cell_columns)]
    sources = [i for i in range(height * width) if i not in destinations]
    result = []
    for sample in x.double():
        cosine = [[_cosine(sample[s], sample[d]) for d in destinations] for s in sources]
        result.append(sorted((max(row) for row in cosine), reverse=True))
    return result


def refined_groups(x: torch.Tensor, groups: list[int], count: int, steps: int) -> list[int]:
    """Spherical k-means on ``[N, C]`` from a grouping, in float64; a group that loses its tokens stays empty."""
    unit = torch.nn.functional.normalize(x.double(), dim=-1)
    for _ in range(steps):
        members = [[i for i, own in enumerate(groups) if own == number] for number in range(count)]
        centres = {number: unit[one].mean(0) for number, one in enumerate(members) if one}
        groups = [max(centres, key=lambda number: _cosine(centres[number], token)) for token in unit]
    return groups


def _cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    length = (a.norm() * b.norm()).item()
    return (a @ b).item() / length if length > 0 else 0.0


def k_means(values: torch.Tensor, centres: torch.Tensor, iterations: int) -> list[int]:
    """Lloyd's algorithm on ``[N, C]`` from ``[K, C]``, in float64: the cluster of each value after the last round.

    A cluster that loses all of its values keeps its centre; ties go to the lower number.
    """
    values, centres = values.double(), centres.double().clone()
    label: list[int] = []
    for _ in range(iterations):
        label = [int(((centres - value) ** 2).sum(-1).argmin()) for value in values]
        for number in range(len(centres)):
            members = [values[i] for i in range(len(values)) if label[i] == number]
            if members:
                centres[number] = torch.stack(members).mean(0)
    return label
