"""The least UNet that a patch accepts, and settings under which its matches serve several steps."""

from typing import NamedTuple

import torch

from tests.small_models.sd_block import SpatialTransformer, UNet
from tome_core import MergeConfig

KEPT = MergeConfig(side="kv", ratio=0.75, use_rand=False, keep=100.0, refine=1, metric="keys+values")


class Least(NamedTuple):
    """One transformer of `depth` blocks on the latent's level, as a case of a test like `unets.Family`."""

    name: str
    depth: int

    def build(self) -> UNet:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return UNet([[SpatialTransformer(16, 2, 24, self.depth)]]).eval().requires_grad_(False)

    def call(self, model, timestep=500.0) -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        x, text = torch.randn(1, 16, 8, 8, generator=generator), torch.randn(1, 5, 24, generator=generator)
        with torch.no_grad():
            return model(x, torch.tensor([float(timestep)]), text)
