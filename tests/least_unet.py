"""The least that is a UNet, called step by step as a sampling calls it, under matches that serve several steps."""

from __future__ import annotations

from typing import NamedTuple

import torch

from tests.sd_block import SpatialTransformer, UNet
from tome_core import MergeConfig

KEPT = MergeConfig(side="kv", ratio=0.75, use_rand=False, keep=100.0, refine=1, metric="keys+values")
TIMES = [999.0 - 50 * step for step in range(20)]
FEW = (900.0, 860.0, 300.0, 280.0, 230.0)
WAYS = {
    "refined": KEPT,
    "keys, drawn": MergeConfig(side="kv", ratio=0.75, keep=100.0, use_rand=True),
    "cluster": MergeConfig(method="cluster", ratio=0.75, keep=100.0),
}


def build(depth: int = 2) -> UNet:
    """One transformer of `depth` blocks on the latent's level; its weights are always the same."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return UNet([[SpatialTransformer(16, 2, 24, depth)]]).eval().requires_grad_(False)


def call(unet, side=8, seed=0, copies=1, time=500.0):
    """What the UNet gives for a latent of the seed. copies: 2 for both halves of guidance, with a text each."""
    generator = torch.Generator().manual_seed(seed)
    x, text = torch.randn(1, 16, side, side, generator=generator), torch.randn(2, 5, 24, generator=generator)
    with torch.no_grad():
        return unet(x.repeat(copies, 1, 1, 1), torch.tensor([time]), text[:copies])


class Least(NamedTuple):
    """The same as a case of a test, as a `tests.models.Family` is one."""

    name: str
    depth: int

    def build(self) -> UNet:
        return build(self.depth)

    def call(self, model, timestep=500.0) -> torch.Tensor:
        return call(model, time=float(timestep))


def draw(unet, handle, times=FEW, name="a", pictures=None, **shape):
    """A sampling of this name: what the calls at these times give, whose clock is set as a host does it."""
    found = []
    for number, time in enumerate(times):
        handle.set_time(timestep=time, sampling=name, pictures=pictures)
        found.append(call(unet, seed=number, **shape))
    return found


def same(found, expected) -> bool:
    """Are these the same tensors, bit for bit?"""
    return len(found) == len(expected) and all(map(torch.equal, found, expected))
