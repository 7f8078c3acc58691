"""A batch of pictures being painted: coordinates, random draws and one way to lay colour on."""

import torch


def smooth(x: torch.Tensor, width: float) -> torch.Tensor:
    """Return 0 for x below ``-width / 2``, 1 for x above ``width / 2``, and smoothstep between them."""
    t = torch.clip(x / width + 0.5, 0, 1)
    return t * t * (3 - 2 * t)


class Canvas:
    """`n` pictures of `size` x `size`, black at first, painted together on the generator's device.

    Painting changes `image` [n, size, size, 3], colours in 0..1, in place. `x` [1, 1, size] and `y` [1, size, 1] are
    pixel centres in 0..1, `y` downwards. `traits` gives `n`: it maps an attribute's name to value indices, int64 [n].
    """

    def __init__(self, traits: dict[str, torch.Tensor], generator: torch.Generator, size: int):
        self.generator, self.device, self.size = generator, generator.device, size
        self.traits = {name: values.to(self.device) for name, values in traits.items()}
        self.n = len(next(iter(traits.values())))
        centres = (torch.arange(size, device=self.device) + 0.5) / size
        self.x, self.y = centres[None, None, :], centres[None, :, None]
        self.edge = 1.5 / size  # width of an anti-aliased edge: one and a half pixels
        self.image = torch.zeros(self.n, size, size, 3, device=self.device)

    def random(self, *shape: int) -> torch.Tensor:
        """Draw uniform values in 0..1 for all pictures from the one generator, float32 [n, *shape]."""
        return torch.rand(self.n, *shape, generator=self.generator, device=self.device)

    def normal(self, *shape: int) -> torch.Tensor:
        """Draw standard normal values for all pictures from the one generator, float32 [n, *shape]."""
        return torch.randn(self.n, *shape, generator=self.generator, device=self.device)

    def uniform(self, low: float, high: float) -> torch.Tensor:
        """Draw one uniform value a picture, [n, 1, 1]."""
        return low + (high - low) * self.random(1, 1)

    def jitter(self, sigma: float) -> torch.Tensor:
        """Draw one normal colour shift a picture, with deviation `sigma`, [n, 1, 1, 3]."""
        return sigma * self.normal(1, 1, 3)

    def row(self, table: torch.Tensor, trait: str) -> torch.Tensor:
        """Look up the table's row for each picture's value of `trait`: [n, 1, 1, *shape of a row]."""
        return table.to(self.device)[self.traits[trait]][:, None, None]

    def has(self, trait: str, value: int) -> torch.Tensor:
        """Say which pictures have this value of `trait`, bool [n, 1, 1]."""
        return (self.traits[trait] == value)[:, None, None]

    def over(self, mask: torch.Tensor, colour: torch.Tensor | float) -> None:
        """Paint `colour`, which broadcasts to image [n, size, size, 3], in place; `mask` [n, size, size]: opacity."""
        self.image += mask[..., None] * (colour - self.image)
