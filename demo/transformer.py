"""A small transformer of Flux's layout on the same latents: joint attention with the prompt, rotary positions."""

import torch
from diffusers import FluxTransformer2DModel
from torch import nn

from demo.prompt import VOCABULARY

# Flux's blocks: two that keep picture and prompt apart but attend jointly, then those that run both as one sequence.
# A token is 2x2 places of the latent, as Flux's are, so 128 px are 1,024 of them.
TRANSFORMER = {
    "patch_size": 1, "in_channels": 48, "num_layers": 2, "num_single_layers": 5, "attention_head_dim": 32,
    "num_attention_heads": 5, "joint_attention_dim": 96, "pooled_projection_dim": 96, "guidance_embeds": False,
    "axes_dims_rope": [8, 12, 12],
}  # fmt: skip
# As deep as a CPU trains in hours: most blocks run both as one sequence, as Flux's do, and 256 px are 4,096 tokens.
TRANSFORMER_DEEP = {**TRANSFORMER, "num_single_layers": 14, "sample_size": 128}
SIDE = 64  # of the latent of a picture of 128 px, whose tokens are one place of the rotary positions apart
TOKEN = 2  # side of a token, in places of the latent


class SceneTransformer(nn.Module):
    """A Flux transformer with its prompt embedding; its state dict has `transformer.*` and `emb.weight` [26, 96]."""

    def __init__(self, config: dict, scheduler: dict, haar_gain: float):
        super().__init__()
        self.transformer = FluxTransformer2DModel(**{k: value for k, value in config.items() if k != "sample_size"})
        self.emb = nn.Embedding(VOCABULARY, config["joint_attention_dim"])
        self.config, self.scheduler, self.haar_gain = config, scheduler, haar_gain
        self.side, self.channels = config.get("sample_size", SIDE), config["in_channels"] // TOKEN**2

    @property
    def network(self) -> nn.Module:
        """The `FluxTransformer2DModel`, without the prompt embedding, which `tome_core.patch` gets."""
        return self.transformer

    def forward(
        self, latents: torch.Tensor, timestep: torch.Tensor, tokens: torch.Tensor, sizes: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Compute the v-prediction [n, 12, h, w] of noisy `latents` at `timestep` (0-d or [n]) for `tokens` int [n, 6].

        sizes: int [n, 6] in pixels, of which three numbers of the first row are used, for all: height of the whole
        picture, which is taken as square, and (third, fourth) how much of it is cut off above and left. None: twice
        `side`, not cut off.
        """
        tiles = nn.functional.pixel_unshuffle(latents, TOKEN)
        height, width = tiles.shape[2:]
        words = self.emb(tokens)
        places = self._places(height, width, sizes, tiles)
        out = self.transformer(
            hidden_states=tiles.flatten(2).transpose(1, 2), encoder_hidden_states=words,
            pooled_projections=words.mean(1), timestep=timestep.expand(len(tiles)).to(tiles) / 1000,
            img_ids=places, txt_ids=places.new_zeros(tokens.shape[1], 3), return_dict=False,
        )[0]  # fmt: skip
        return nn.functional.pixel_shuffle(out.transpose(1, 2).unflatten(2, (height, width)), TOKEN)

    def _places(self, height: int, width: int, sizes: torch.Tensor | None, tiles: torch.Tensor) -> torch.Tensor:
        """Return each token's middle as (0, down, right), float32 [h * w, 3]. A whole picture has 32 in each direction.

        height, width: in tokens. sizes: the picture's, see `forward`. tiles: any tensor on the device.
        """
        top, left, unit = 0.0, 0.0, SIDE / self.side
        if sizes is not None:
            whole, _, top, left = sizes[0, :4].tolist()
            unit, top, left = 2 * SIDE / whole, top / (2 * TOKEN), left / (2 * TOKEN)
        down, right = (torch.arange(count, device=tiles.device) + 0.5 for count in (height, width))
        grid = torch.stack(torch.meshgrid((down + top) * unit, (right + left) * unit, indexing="ij"), -1)
        return torch.cat([torch.zeros_like(grid[..., :1]), grid], -1).flatten(0, 1)
