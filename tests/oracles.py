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


def window_similarities(x, height: int, width: int, sy: int, sx: int, window: int) -> list[dict[int, float]]:
    """For each sample and source the best cosine to a top-left destination of its own window, in float64.

    A window is the tokens of ``window // sy`` by ``window // sx`` cells, one at least; what lies beyond the last
    whole cell of a row or column belongs to that cell's window.
    """
    rows, columns = max(1, height // sy), max(1, width // sx)
    down, right = max(1, window // sy), max(1, window // sx)

    def window_of(row: int, column: int) -> tuple[int, int]:
        return min(row // sy, rows - 1) // down, min(column // sx, columns - 1) // right

    destinations = {(r * sy, c * sx) for r in range(rows) for c in range(columns)}
    result = []
    for sample in x.double():
        best = {}
        for r, c in ((r, c) for r in range(height) for c in range(width) if (r, c) not in destinations):
            near = [d for d in destinations if window_of(*d) == window_of(r, c)]
            best[r * width + c] = max(_cosine(sample[r * width + c], sample[d[0] * width + d[1]]) for d in near)
        result.append(best)
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
