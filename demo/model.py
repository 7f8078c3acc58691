"""The embedded models: small ones of Stable Diffusion's, SDXL's and Flux's layout on a fixed Haar latent."""

import json
import math
import os
from pathlib import Path

import torch
from diffusers import UNet2DConditionModel
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from demo.prompt import VOCABULARY
from demo.transformer import TRANSFORMER, TRANSFORMER_DEEP, SceneTransformer

WEIGHTS = Path(__file__).with_name("scenes128.safetensors")
COMMON = {"in_channels": 12, "out_channels": 12, "layers_per_block": 1, "cross_attention_dim": 96,
          "norm_num_groups": 16}  # fmt: skip
UNET = {
    **COMMON, "sample_size": 64, "block_out_channels": [32, 64, 128],
    "down_block_types": ["CrossAttnDownBlock2D"] * 3, "up_block_types": ["CrossAttnUpBlock2D"] * 3,
    "attention_head_dim": [2, 2, 4],  # diffusers means the number of heads by it: 16, 32 and 32 channels each
    "places": True,  # ours: its first convolution is a `PlacedConv`
}  # fmt: skip
# No attention at the finest level, transformer depth 2 and 10 below it, linear projections, text_time conditioning.
UNET_XL = {
    **COMMON, "sample_size": 128, "block_out_channels": [32, 64, 48],
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
    "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
    "transformer_layers_per_block": [1, 2, 10], "use_linear_projection": True, "attention_head_dim": [1, 2, 2],
    "addition_embed_type": "text_time", "addition_time_embed_dim": 32,
    "projection_class_embeddings_input_dim": 96 + 6 * 32,  # the pooled text, and six sizes of 32 channels each
}  # fmt: skip
LAYOUTS = {"sd": UNET, "sdxl": UNET_XL, "flux": TRANSFORMER, "flux-deep": TRANSFORMER_DEEP}
SCHEDULER = {
    "num_train_timesteps": 1000, "beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012,
    "prediction_type": "v_prediction", "rescale_betas_zero_snr": True, "clip_sample": False,
}  # fmt: skip
SCALE = ".scale"  # behind a weight's name in a file: that of its steps
EIGHT_BITS = 4096  # numbers; smaller weights, among them the first and the last convolution and the words, have sixteen
HAAR_GAIN = 5.0  # detail bands of these scenes are about five times weaker than the mean band
# waves tell a convolution where it is; the longest is twice as long as a picture, each half as long as the one before
WAVES = 3
FEATURES = 4 * WAVES  # a sine and a cosine of each, down and across
Window = tuple[float, float, float, float]
WHOLE: Window = (0.0, 0.0, 1.0, 1.0)


def encode(pictures: torch.Tensor, gain: float = HAAR_GAIN) -> torch.Tensor:
    """Turn pictures [n, 3, H, W] in -1..1, H and W even, to latents [n, 12, H/2, W/2]: one level of the Haar transform.

    Three channels of means, doubled, come first, then nine of detail, which are multiplied by `gain`.
    """
    a, b = pictures[..., ::2, ::2], pictures[..., ::2, 1::2]
    c, d = pictures[..., 1::2, ::2], pictures[..., 1::2, 1::2]
    details = [a - b + c - d, a + b - c - d, a - b - c + d]
    return torch.cat([(a + b + c + d) / 2, *(gain * detail / 2 for detail in details)], 1)


def decode(latents: torch.Tensor, gain: float = HAAR_GAIN) -> torch.Tensor:
    """Turn latents [n, 12, h, w] back to pictures [n, 3, 2h, 2w]: divide the nine detail channels alone by `gain`."""
    mean, across, down, diagonal = latents.chunk(4, 1)
    across, down, diagonal = across / gain, down / gain, diagonal / gain
    n, channels, height, width = mean.shape
    pictures = latents.new_empty(n, channels, 2 * height, 2 * width)
    pictures[..., ::2, ::2] = (mean + across + down + diagonal) / 2
    pictures[..., ::2, 1::2] = (mean - across + down - diagonal) / 2
    pictures[..., 1::2, ::2] = (mean + across - down - diagonal) / 2
    pictures[..., 1::2, 1::2] = (mean - across - down + diagonal) / 2
    return pictures


class PlacedConv(nn.Conv2d):
    """A copy of the convolution `like` that adds a linear map, at first zero, of each output position's `features`.

    `window` is the part of the picture that the input is: (top, left, height, width) in shares of it, at first all.
    """

    def __init__(self, like: nn.Conv2d):
        super().__init__(like.in_channels, like.out_channels, like.kernel_size, like.stride, like.padding)
        self.load_state_dict(like.state_dict())
        self.place = nn.Conv2d(FEATURES, like.out_channels, 1, bias=False)
        nn.init.zeros_(self.place.weight)
        self.window = WHOLE

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Convolve [n, in, h, w] to [n, out, h, w], and add the linear map of `features` of each position."""
        seen = super().forward(x)
        return seen + self.place(features(*seen.shape[2:], self.window, seen.device).to(seen.dtype))


def features(height: int, width: int, window: Window = WHOLE, device: torch.device | str = "cpu") -> torch.Tensor:
    """Compute sines and cosines of the position in the picture of each of the window's cells, [1, FEATURES, h, w].

    window: (top, left, height, width), in shares of the picture, of the part that has `height` x `width` cells.
    """
    top, left, tall, wide = window
    # all made on the device: a copy to it waits, and cannot be captured in a CUDA graph
    waves = math.pi * 2.0 ** torch.arange(WAVES, device=device)[:, None, None]
    down, across = ((torch.arange(count, device=device) + 0.5) / count for count in (height, width))
    phases = ((waves * (top + tall * down[:, None])).expand(-1, -1, width),
              (waves * (left + wide * across)).expand(-1, height, -1))
    return torch.cat([wave for phase in phases for wave in (phase.sin(), phase.cos())])[None]


class SceneModel(nn.Module):
    """A diffusers UNet with its prompt embedding. The state dict has the keys `unet.*` and `emb.weight` [26, 96].

    In SDXL's layout it also has `pooled.*`: the second text input is a linear map of the tokens' mean embedding.
    unet: like UNET; sample_size: the latent's side, half a picture's. scheduler: like SCHEDULER. haar_gain: `encode`'s.
    """

    def __init__(self, unet: dict, scheduler: dict, haar_gain: float):
        super().__init__()
        self.unet = UNet2DConditionModel(**{name: value for name, value in unet.items() if name != "places"})
        if unet.get("places"):
            self.unet.conv_in = PlacedConv(self.unet.conv_in)
        width = unet["cross_attention_dim"]
        self.emb = nn.Embedding(VOCABULARY, width)
        self.pooled = nn.Linear(width, width) if unet.get("addition_embed_type") == "text_time" else None
        self.config, self.scheduler, self.haar_gain = unet, scheduler, haar_gain
        self.side, self.channels = unet["sample_size"], unet["in_channels"]

    @property
    def network(self) -> nn.Module:
        """The UNet, which `tome_core.patch` gets."""
        return self.unet

    def forward(
        self, latents: torch.Tensor, timestep: torch.Tensor, tokens: torch.Tensor, sizes: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Compute the v-prediction [n, 12, h, w] of noisy `latents` at `timestep` (0-d or [n]) for `tokens` int [n, 6].

        sizes: int [n, 6] in pixels, as SDXL takes them: height and width of the picture that this is a part of, how
        much of it is cut off above and left, height and width of this part; by default a whole picture, 2h x 2w.
        SDXL's layout looks at them, and a `PlacedConv`, which takes the first row for all of them.
        """
        words, added = self.emb(tokens), None
        if isinstance(self.unet.conv_in, PlacedConv):
            height, width, top, left, tall, wide = (1, 1, 0, 0, 1, 1) if sizes is None else sizes[0].tolist()
            self.unet.conv_in.window = top / height, left / width, tall / height, wide / width
        if self.pooled is not None:
            if sizes is None:
                height, width = 2 * latents.shape[2], 2 * latents.shape[3]
                sizes = torch.tensor([[height, width, 0, 0, height, width]], device=latents.device)
            added = {"text_embeds": self.pooled(words.mean(1)), "time_ids": sizes.expand(len(words), -1)}
        return self.unet(latents, timestep, words, added_cond_kwargs=added, return_dict=False)[0]


def make(config: dict, scheduler: dict | None = None, haar_gain: float = HAAR_GAIN) -> SceneModel | SceneTransformer:
    """Make a model with random weights. scheduler: the noise schedule's configuration; None is SCHEDULER.

    config: a value of `LAYOUTS`, or similar; with "num_single_layers" a SceneTransformer's. haar_gain: as in `encode`.
    """
    kind = SceneTransformer if "num_single_layers" in config else SceneModel
    return kind(config, scheduler or SCHEDULER, haar_gain)


def pack(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Compress weights: matrices and kernels of 4096 numbers or more to int8 and steps, all others to float16.

    Steps, one for each output channel, are float16 [out] with the name NAME.scale.
    """
    packed = {}
    for name, value in weights.items():
        packed[name] = value.half()
        if value.dim() > 1 and value.numel() >= EIGHT_BITS:
            step = (value.float().abs().flatten(1).amax(1) / 127).half().clamp(min=2**-24)
            packed[name] = (value.float() / _broadcastable(step, value)).round().clamp(-127, 127).to(torch.int8)
            packed[name + SCALE] = step
    return packed


def unpack(packed: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return all weights as float32: those with steps (NAME.scale) multiplied by them, the steps left out."""
    weights = {name: value.float() for name, value in packed.items() if not name.endswith(SCALE)}
    return {name: value * _broadcastable(packed[name + SCALE], value) if name + SCALE in packed else value
            for name, value in weights.items()}  # fmt: skip


def _broadcastable(step: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return the steps ``[out]`` of int8 weights as float32 ``[out, 1, ...]``, with as many dimensions as `value`."""
    return step.float().view(-1, *[1] * (value.dim() - 1))


def save(model: SceneModel | SceneTransformer, path: Path) -> None:
    """Write a model's configuration and weights, compressed by `pack`, as safetensors; replace `path` in one move."""
    metadata = {"unet_config": json.dumps(model.config), "scheduler": json.dumps(model.scheduler),
                "haar_gain": str(model.haar_gain)}  # fmt: skip
    unfinished = Path(f"{path}.part")
    weights = {name: value.cpu().contiguous() for name, value in pack(model.state_dict()).items()}
    save_file(weights, unfinished, metadata)
    os.replace(unfinished, path)


def load(path: Path = WEIGHTS) -> SceneModel | SceneTransformer:
    """Load a model in float32 on the CPU, in eval mode. Raises ValueError if the file is no weights of this demo."""
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            weights = unpack({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
        unet, scheduler = json.loads(metadata["unet_config"]), json.loads(metadata["scheduler"])
        model = make(unet, scheduler, float(metadata["haar_gain"]))
        model.load_state_dict(weights)
    except (SafetensorError, KeyError, RuntimeError) as error:
        raise ValueError(f"{path} holds no scene model of this demo ({error}); "
                         "give a file that demo.training.train wrote, or restore it from the repository") from error
    return model.eval()
