"""The smallest form of merging keys and values: what each of the patches in this folder carries, letter for letter."""

import torch


def _token_grid(tokens: int, height: int, width: int, max_downsample: int) -> tuple[int, int] | None:
    """Rows and columns of so many tokens of a latent, down-sampled at most so much from it; None if there are none."""
    downsample = 1
    while downsample <= max_downsample:
        rows, columns = -(-height // downsample), -(-width // downsample)
        if rows * columns == tokens:
            return rows, columns
        downsample *= 2
    return None


def _group_tokens(
    keys: torch.Tensor, values: torch.Tensor, rows: int, columns: int, ratio: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Groups of tokens whose keys and values are alike: each token joins the nearest of a coarser grid of tokens.

    keys, values: `[B, rows * columns, C]`. ratio: share of the tokens that is merged away.
    Returns the group of each token, int64 `[B, N]`, and each group's number of tokens, float32 `[B, G]`, at least 1.
    """
    with torch.no_grad():
        device, side = keys.device, (1 - ratio) ** 0.5
        down, right = (
            (2 * torch.arange(count, device=device) + 1) * length // (2 * count)
            for length, count in ((rows, max(1, round(rows * side))), (columns, max(1, round(columns * side))))
        )
        places = (down[:, None] * columns + right).flatten()

        # at a variance of 1 keys and values count alike
        parts = [x.float() - x.float().mean(1, keepdim=True) for x in (keys, values)]
        tokens = torch.cat([x / x.square().mean((1, 2), keepdim=True).sqrt().clamp(min=1e-6) for x in parts], -1)

        # in pieces: all distances in a large picture would take more memory than its attention
        centres = tokens[:, places]
        group = torch.cat([torch.cdist(some, centres).argmin(-1) for some in tokens.split(4096, 1)], 1)
        group[:, places] = torch.arange(len(places), device=device)  # also where two are equal: no group is empty
        sizes = torch.zeros(len(keys), len(places), device=device)
        return group, sizes.scatter_add_(1, group, torch.ones_like(group, dtype=sizes.dtype))


def _merge_tokens(x: torch.Tensor, group: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """The mean of each group, `[B, G, C]`, of tokens `x [B, N, C]`; summed in float32."""
    sums = torch.zeros(*sizes.shape, x.shape[-1], device=x.device)
    sums = sums.scatter_add(1, group[..., None].expand_as(x), x.float())
    return (sums / sizes[..., None]).to(x.dtype)
