"""The models for foreign things, and the parts of them on which such things are put."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.small_models import dits, unets
from tests.small_models.unets import CASES, TEXT, Family, call_ldm, inputs, ldm_of_one_level, seeded
from tome_core.engine.merged_tokens import LazyTokens
from tome_core.models import adapter_of, find_models, transformer_blocks
from tome_core.models.sites import AttentionSite
from tome_core.models.transformer_blocks import TransformerBlockSite


def calm(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """The builder of a model whose blocks change their tokens a little, as trained ones do: they merge as well."""

    def builder() -> nn.Module:
        model = build()
        with torch.no_grad():
            for path, weight in model.named_parameters():
                if path.endswith(("attn1.to_out.0.weight", "attn2.to_out.0.weight", "ff.net.2.weight")):
                    weight.mul_(0.25)
        return model

    return builder


def _call_deep_ldm(model: Any, x: torch.Tensor, timestep: Any, text: torch.Tensor) -> torch.Tensor:
    return call_ldm(model, x, timestep, [text] * 9)  # one for each block of a transformer, also if blocks run twice


UNETS = {case.name: case for case in (Family("ldm", ldm_of_one_level, call_ldm), *CASES)}
# models with stretches: blocks of a transformer that run together on merged tokens
_SDXL = seeded(unets.unet, **unets.SDXL | {"transformer_layers_per_block": (1, 1, 4)})
_LDM = seeded(unets.host_double, attention_resolutions=(4,), channel_mult=(1, 1, 1), num_heads=2,
              transformer_depth=3, context_dim=[TEXT] * 3)  # fmt: skip
DEEP = (Family("sdxl, four blocks", calm(_SDXL), UNETS["sdxl"].forward),
        Family("ldm, three blocks", calm(_LDM), _call_deep_ldm))  # fmt: skip
UNETS |= {case.name: case for case in DEEP}
STRETCHED = (*(case.name for case in DEEP), "sdxl")
QUICK = ("sd15", "ldm", "Qwen-Image", "Wan")
SLOW = (*STRETCHED, "sd2", "ldm_sd2", "sgm_double", "gligen", "motion", "Flux", "Flux, two pictures", "SD3.5",
        "Qwen-Image, padded", "Z-Image", "Lumina 2", "PixArt", "LTX", "HunyuanVideo")  # fmt: skip
MODELS = [name for name in (*QUICK, *SLOW) if name in UNETS or name in dits.PRESENT]
# two steps that have one match, late in a picture
TIMES = (340, 320)
_LAYERS = 4  # of a transformer, of which those between the first and the last may merge as a whole
_COARSE = 2  # places a side, between which a latent is smooth: then merging is good, and effects of things show
_SIDES = dict.fromkeys((*STRETCHED, "ldm_sd2", "sgm_double"), 32)  # of latents; at 16 these models have few tokens


class Beside:
    """One model, and the parts for foreign things. attentions: those over the picture's tokens; around: their blocks,
    and a UNet's transformers; blocks: a UNet's, by path; later: those but a transformer's first; deep: the
    transformers that have those. is_by_hand: does an attention compute its scores itself?"""

    def __init__(self, name: str) -> None:
        self.name, self.is_by_hand = name, name in ("ldm", "ldm_sd2", "ldm, three blocks")
        self.whole = UNETS[name].build() if name in UNETS else dits.make(name, _LAYERS)[0]
        (self.model,) = find_models(self.whole)
        adapter = adapter_of(self.model)
        ways = set() if name in UNETS else {"blocks"}
        levels = {level: ways for level in range(len(adapter.downsamples))}
        sites = [*adapter.wraps(self.model, levels, lambda kind, module, *_: (kind, module))]
        self.attentions = [module for kind, module in sites if kind is AttentionSite]
        paths = {module: path for path, module in self.model.named_modules()}
        block_paths = list(dict.fromkeys(paths[attention].rpartition(".")[0] for attention in self.attentions))
        outer = {path.rpartition(".transformer_blocks.")[0] for path in block_paths} - {""}
        self.around = [self.model.get_submodule(path) for path in (*sorted(outer), *block_paths)]
        self.blocks = {path: self.model.get_submodule(path) for path in block_paths if name in UNETS}
        self.later = {path: block for path, block in self.blocks.items() if not path.endswith(".0")}
        deep = dict.fromkeys(path.rpartition(".transformer_blocks.")[0] for path in self.later)
        if name not in UNETS:
            self.blocks = self.later = {paths[module]: module for kind, module in sites if kind is TransformerBlockSite}
        self.deep = [self.model.get_submodule(path) for path in deep]

    def draw(self, times: tuple[int, ...] = TIMES) -> torch.Tensor:
        with torch.no_grad():
            return torch.stack([self.call(time) for time in times])

    def call(self, time: int) -> torch.Tensor:
        if self.name in UNETS:
            case, side = UNETS[self.name], _SIDES.get(self.name, 16)
            x, text = inputs(4, 2, side, side, frames=case.frames)
            return case.forward(self.whole, _smooth(x), time, text)
        given = dits.at(dits.arguments_of(self.name), time / 500)
        name = "x" if "x" in given else "hidden_states"
        return dits.call(self.whole, {**given, name: _smooth(given[name])})

    @contextmanager
    def few(self) -> Iterator[set[str]]:
        with self.tokens_of_blocks() as tokens, pytest.MonkeyPatch.context() as patches:
            few: set[str] = set()
            plain = transformer_blocks.around

            def noted(call: Any, place: Any, *more: Any) -> Any:
                out = plain(call, place, *more)
                if type(out) is LazyTokens:
                    few.add(place.name)
                return out

            patches.setattr(transformer_blocks, "around", noted)
            yield few
        most = {path: max(tokens.get(path.rpartition(".")[0] + ".0", ()), default=0) for path in self.later}
        few |= {path for path in self.later if min(tokens.get(path, ()), default=most[path]) < most[path]}

    @contextmanager
    def tokens_of_blocks(self) -> Iterator[dict[str, set[int]]]:
        """Note how many tokens each block of a UNet gets, by path; the patch cannot see it, as it would see a hook."""
        seen, plain = {path: set() for path in self.blocks if self.name in UNETS}, F.layer_norm

        def noted(x: torch.Tensor, shape: Any, weight: Any = None, *more: Any, **options: Any) -> torch.Tensor:
            for path in seen if weight is not None else ():
                if self.blocks[path].norm3.weight is weight:
                    seen[path].add(x.shape[1])
            return plain(x, shape, weight, *more, **options)

        with pytest.MonkeyPatch.context() as patches:
            patches.setattr(F, "layer_norm", noted)
            yield seen

    def calls_of_attentions(self) -> int:
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
        width = 16 if latent.shape[1] == 3 * 16 * 16 else dits.SIDE
        return _smooth(latent.mT.unflatten(2, (-1, width))).flatten(2).mT.contiguous()
    coarse = latent[..., :_COARSE, :_COARSE].flatten(0, -3)[None]
    return F.interpolate(coarse, size=latent.shape[-2:], mode="bicubic").view(latent.shape)
