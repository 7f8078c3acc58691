"""The models for foreign things, and the parts of them on which such things are put."""

from contextlib import ExitStack
from typing import Any

import torch
import torch.nn.functional as F

from tests import tiny_transformers
from tests.models import CASES, Family, call_ldm, inputs, ldm_of_one_level
from tome_core.models import adapter_of, find_models
from tome_core.models.sites import AttentionSite

UNETS = {case.name: case for case in (Family("ldm", ldm_of_one_level, call_ldm), *CASES)}
QUICK = ("sd15", "ldm", "Qwen-Image", "Wan")
SLOW = ("sdxl", "sd2", "ldm_sd2", "sgm_double", "gligen", "motion", "Flux", "Flux, two pictures", "SD3.5",
        "Qwen-Image, padded", "Z-Image", "Lumina 2", "PixArt", "LTX", "HunyuanVideo")  # fmt: skip
MODELS = [name for name in (*QUICK, *SLOW) if name in UNETS or name in tiny_transformers.PRESENT]
# two steps that have one match, late in a picture
TIMES = (340, 320)
_COARSE = 2  # places a side, between which a latent is smooth: then merging is good, and effects of things show
_SIDES = {"sdxl": 32, "ldm_sd2": 32, "sgm_double": 32}  # sides of latents; at 16 these models have few tokens


class Beside:
    """One model, and the parts for foreign things. attentions: those over the picture's tokens; around: their blocks,
    and a UNet's transformers. is_by_hand: does an attention compute its scores itself?"""

    def __init__(self, name: str) -> None:
        self.name, self.is_by_hand = name, name in ("ldm", "ldm_sd2")
        self.whole = UNETS[name].build() if name in UNETS else tiny_transformers.make(name)[0]
        (self.model,) = find_models(self.whole)
        adapter = adapter_of(self.model)
        levels = {level: set() for level in range(len(adapter.downsamples))}
        sites = adapter.wraps(self.model, levels, lambda kind, module, *_: (kind, module))
        self.attentions = [module for kind, module in sites if kind is AttentionSite]
        paths = {module: path.rpartition(".")[0] for path, module in self.model.named_modules()}
        block_paths = list(dict.fromkeys(paths[attention] for attention in self.attentions))
        outer = {path.rpartition(".transformer_blocks.")[0] for path in block_paths} - {""}
        self.around = [self.model.get_submodule(path) for path in (*sorted(outer), *block_paths)]

    def draw(self, times: tuple[int, ...] = TIMES) -> torch.Tensor:
        """Return the model's outputs at these times, one call after the other."""
        return torch.stack([self._call(time) for time in times])

    @torch.no_grad()
    def _call(self, time: int) -> torch.Tensor:
        if self.name in UNETS:
            case, side = UNETS[self.name], _SIDES.get(self.name, 16)
            x, text = inputs(4, 2, side, side, frames=case.frames)
            return case.forward(self.whole, _smooth(x), time, text)
        given = tiny_transformers.at(tiny_transformers.arguments_of(self.name), time / 500)
        name = "x" if "x" in given else "hidden_states"
        return tiny_transformers.call(self.whole, {**given, name: _smooth(given[name])})

    def calls_of_attentions(self) -> int:
        """Count the calls of attentions that a `draw` makes."""
        calls: list[Any] = []
        with ExitStack() as hooks:
            for module in self.attentions:
                hooks.callback(module.register_forward_pre_hook(lambda *_: calls.append(None)).remove)
            self.draw()
        return len(calls)


def _smooth(latent: Any) -> Any:
    """Make a latent, a list of latents or packed tokens ``[B, N, C]`` vary smoothly between a few places."""
    if not torch.is_tensor(latent):
        return [_smooth(part) for part in latent]
    if latent.dim() == 3:
        width = 16 if latent.shape[1] == 3 * 16 * 16 else tiny_transformers.SIDE
        return _smooth(latent.mT.unflatten(2, (-1, width))).flatten(2).mT.contiguous()
    coarse = latent[..., :_COARSE, :_COARSE].flatten(0, -3)[None]
    return F.interpolate(coarse, size=latent.shape[-2:], mode="bicubic").view(latent.shape)
