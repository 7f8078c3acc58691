"""diffusers' transformers (Flux, SD3, Qwen-Image, Wan and others): which are known, and how their calls are read.

They are known by the names of their classes, and with each where the picture's tokens lie in its sequences, and what
its timestep means. The rest its modules and the names of its arguments tell. What is not here is not guessed.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from math import prod
from operator import mul
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from ..engine.decision import Call
from ..merging.grid import Grid, Layout
from ..reporting.ledger import NO_GRID, LevelTally
from ..settings.schedule import PipelineSteps
from .sites import AttentionSite, ModelSite
from .wrap import Wrap

UNEVEN = "its pictures are of different sizes"


class Tokens(NamedTuple):
    """The picture's tokens in one call.

    count: the picture's and those behind it that are of its kind, as references are.
    latent: ``[B, C, (frames,) H, W]``, or a view of as many places; its values are looked at for copies alone.
    first: how many tokens of earlier films lie before them.
    """

    grid: Grid
    count: int
    latent: torch.Tensor
    first: int = 0


class Family(NamedTuple):
    """A family is what neither a class's calls nor its modules tell, and its name has to.

    text_first: does the text lie before the picture's tokens? timestep: of a time; Stable Diffusion's, a flow model's
    sigma times 1000. downsample: latent places a token, a side. attentions: what the paths of the modules match.
    """

    text_first: bool = False
    timestep: Callable[[Any], Any] = lambda time: time
    downsample: int = 2
    attentions: str = r"\w*(blocks|layers|noise_refiner)\.\d+\.(block\.)?(attn1?|attention)"


def _of_latent(model: nn.Module, given: Mapping[str, Any]) -> Tokens | str:
    """``[B, C, H, W]``, ``[B, C, frames, H, W]`` or, in CogVideoX, ``[B, frames, C, H, W]`` in patches."""
    latent, config = given["hidden_states"], model.config
    if latent.dim() == 5 and latent.shape[1] != config.in_channels:
        latent = latent.transpose(1, 2)
    size, along = config.patch_size, getattr(config, "patch_size_t", None) or 1
    along, down, right = (along, size, size) if isinstance(size, int) else (1, *size)[-3:]
    frames = 1 if latent.dim() == 4 else latent.shape[2] // along
    height, width = latent.shape[-2] // down, latent.shape[-1] // right
    return Tokens(Grid(frames * height, width, frames), frames * height * width, latent)


def _of_history(model: nn.Module, given: Mapping[str, Any]) -> Tokens | str:
    """FramePack: films drawn before lie in front of this one, in larger patches the older they are."""
    older = [(given[name], along) for name, along in zip(_HISTORY, (4, 2, 1), strict=False) if given[name] is not None]
    patches = [(film.shape[2:], (along, 2 * along, 2 * along)) for film, along in older]
    before = sum(prod(-(-side // size) for side, size in zip(*one, strict=True)) for one in patches)
    return _of_latent(model, given)._replace(first=before)


def _of_ids(model: nn.Module, given: Mapping[str, Any]) -> Tokens | str:
    """Flux: ``img_ids [N, 3]``, the first another one for reference pictures, which lie behind; Krea 2: text's, too."""
    packed = given["hidden_states"]
    shape = _grid_of_ids(given["img_ids"] if "img_ids" in given else given["position_ids"], packed.shape[1])
    if shape is None:
        return NO_GRID
    places = packed[:, : shape[0] * shape[1]].unflatten(1, shape)
    latent = places.movedim(3, 1)
    if packed.shape[2] % 4 == 0 and getattr(model.config, "patch_size", 1) == 1 and packed.shape[2] >= 16:
        latent = places.unflatten(3, (-1, 2, 2)).permute(0, 3, 1, 4, 2, 5).flatten(4).flatten(2, 3)
    return Tokens(Grid(*shape), packed.shape[1], latent)


_GRIDS: WeakIdKeyDictionary = WeakIdKeyDictionary()  # of tensors of ids: version, and what was found


def _grid_of_ids(ids: torch.Tensor, count: int) -> tuple[int, int] | None:
    """Height and width; None if they are no grid. A pipeline gives one tensor at all steps, and one of them waits."""
    version = None if ids.is_inference() else (ids._version, count)  # None: who writes into it cannot be told
    known = _GRIDS.get(ids)
    if known is None or version is None or known[0] != version:
        known = _GRIDS[ids] = version, _read_grid(ids.detach().flatten(0, -2)[-count:].cpu())
    return known[1]


def _read_grid(ids: torch.Tensor) -> tuple[int, int] | None:
    own = ids[: int((ids[:, 0] == ids[0, 0]).long().cumprod(0).sum())]
    width = int((own[:, 1] == own[0, 1]).long().cumprod(0).sum())
    if len(own) % width:
        return None
    places = own.unflatten(0, (-1, width))
    is_grid = (places[:, :, 1] == places[:, :1, 1]).all() and (places[:, :, 2] == places[:1, :, 2]).all()
    return (len(own) // width, width) if is_grid else None


def _of_shapes(model: nn.Module, given: Mapping[str, Any]) -> Tokens | str:
    """Qwen-Image: ``img_shapes``, for each picture ``(frames, height, width)`` of it and of its references."""
    shapes = given["img_shapes"]
    if not shapes:
        return NO_GRID
    if any(one != shapes[0] for one in shapes):
        return UNEVEN
    frames, height, width = shapes[0][0] if isinstance(shapes[0], list) else shapes[0]
    packed = given["hidden_states"]
    places = packed[:, : frames * height * width].unflatten(1, (frames * height, width)).movedim(3, 1)
    return Tokens(Grid(frames * height, width, frames), packed.shape[1], places)


def _of_list(model: nn.Module, given: Mapping[str, Any]) -> Tokens | str:
    """Z-Image: a list of latents ``[C, frames, H, W]``."""
    latents = given["x"]
    if not all(torch.is_tensor(one) for one in latents):
        return "references came along"
    if any(one.shape != latents[0].shape for one in latents):
        return UNEVEN
    _, frames, height, width = latents[0].shape
    size, along = given["patch_size"], given["f_patch_size"]
    frames, height, width = frames // along, height // size, width // size
    return Tokens(Grid(frames * height, width, frames), frames * height * width, torch.stack(list(latents)))


def _of_film(model: nn.Module, given: Mapping[str, Any]) -> Tokens | str:
    """LTX: the film's sizes come along."""
    frames, height, width, packed = (given[name] for name in _FILM[:4])
    if None in (frames, height, width) or frames * height * width != packed.shape[1]:
        return NO_GRID
    latent = packed.unflatten(1, (frames, height, width)).movedim(4, 1)
    return Tokens(Grid(frames * height, width, frames), packed.shape[1], latent)


_FILM = ("num_frames", "height", "width", "hidden_states")
_HISTORY = ("latents_history_4x", "latents_history_2x", "latents_clean", "hidden_states")
TIMES = ("timestep", "timesteps", "t")
# how a call is read: the first whose arguments its class's forward has
_READERS: dict[tuple[str, ...], Callable[[nn.Module, Mapping[str, Any]], Tokens | str]] = {
    ("img_ids", "txt_ids", "hidden_states"): _of_ids, ("position_ids", "hidden_states"): _of_ids,
    ("img_shapes", "hidden_states"): _of_shapes, ("x", "patch_size", "f_patch_size"): _of_list,
    _FILM: _of_film, _HISTORY: _of_history, ("hidden_states",): _of_latent,
}  # fmt: skip
_KINDS = {
    Family(True, partial(mul, 1000)): ("AuraFlowTransformer2DModel", "ChromaTransformer2DModel",
        "Flux2Transformer2DModel", "FluxTransformer2DModel", "Krea2Transformer2DModel",
        "LongCatImageTransformer2DModel", "OvisImageTransformer2DModel", "QwenImageTransformer2DModel"),
    Family(True): ("BriaFiboTransformer2DModel", "BriaTransformer2DModel", "CogVideoXTransformer3DModel",
        "CogView3PlusTransformer2DModel", "CogView4Transformer2DModel", "ConsisIDTransformer3DModel"),
    Family(True, lambda time: 1000 * (1 - time)): ("Lumina2Transformer2DModel",),
    Family(False, lambda time: 1000 * (1 - time)): ("ZImageTransformer2DModel",),
    Family(False, lambda time: 1000 - time): ("MochiTransformer3DModel",),
    Family(attentions=r"transformer_blocks\.\d+\.attn2?"): ("SD3Transformer2DModel",),
    Family(downsample=1): ("HunyuanImageTransformer2DModel", "HunyuanVideo15Transformer3DModel",
        "LTX2VideoTransformer3DModel", "LTXVideoTransformer3DModel"),
    Family(): ("AllegroTransformer3DModel", "ChronoEditTransformer3DModel", "DiTTransformer2DModel",
        "HiDreamImageTransformer2DModel", "HunyuanDiT2DModel", "HunyuanVideoFramepackTransformer3DModel",
        "HunyuanVideoTransformer3DModel", "PixArtTransformer2DModel", "SkyReelsV2Transformer3DModel",
        "WanAnimateTransformer3DModel", "WanTransformer3DModel", "WanVACETransformer3DModel"),
}  # fmt: skip
FAMILIES: dict[str, Family] = {name: family for family, names in _KINDS.items() for name in names}
NAMES = tuple(FAMILIES)
_IN_PIPELINES = ("transformer", "transformer_2")  # Wan 2.2 has two, for early and for late steps


def family_of(model: Any) -> Family | None:
    """By its class's name, or that of a class it is derived from."""
    if not isinstance(model, nn.Module):
        return None
    return next((FAMILIES[one.__name__] for one in type(model).__mro__ if one.__name__ in FAMILIES), None)


def find_transformers(model: Any) -> list[nn.Module]:
    """The known transformers of a pipeline, or the model itself; none where it is or has no known one."""
    inner = (model, *(getattr(model, name, None) for name in _IN_PIPELINES))
    found = (getattr(one, "_orig_mod", one) for one in inner)  # of a compiled one
    return [one for one in found if family_of(one) is not None]


def find_attentions(model: nn.Module, family: Family) -> list[tuple[str, nn.Module]]:
    """Path and module of each attention over the picture's tokens, in order."""
    return [(path, one) for path, one in model.named_modules() if re.fullmatch(family.attentions, path)]


class TransformerAdapter:
    """What the engine has to know of one transformer of a known family. For its attributes see `unet.UNetAdapter`."""

    layout = "transformer"

    def __init__(self, model: nn.Module) -> None:
        self.family = family_of(model)
        self.downsamples = [self.family.downsample]
        self._blocks = len(find_attentions(model, self.family))
        parameters = inspect.signature(type(model).forward).parameters.values()
        known = {one.name: (place - 1, one.default) for place, one in enumerate(parameters)}
        names, self._tokens = next(one for one in _READERS.items() if known.keys() >= {*one[0]})
        self.reads = (*names, next(name for name in TIMES if name in known))
        by_name_alone = sys.maxsize, None
        self._arguments = [(name, *known.get(name, by_name_alone)) for name in self.reads]

    def tallies(self) -> list[LevelTally]:
        """One: all of its attentions are over the same tokens."""
        return [LevelTally(self.family.downsample, self._blocks)]

    def wraps(self, model: nn.Module, levels: set[int], around: set[int], make: Callable[..., Wrap]) -> Iterator[Wrap]:
        """What has to be put on the model, the outermost first. make: as of `unet.UNetAdapter.wraps`."""
        yield make(ModelSite, model)
        for path, module in find_attentions(model, self.family):
            yield make(AttentionSite, module, path, 0)

    def pick(self, model: nn.Module, args: tuple, kwargs: Mapping[str, Any]) -> list[Any]:
        """The arguments of `reads`, in a way that a compiler can follow."""
        return [kwargs[name] if name in kwargs else args[place] if place < len(args) else default
                for name, place, default in self._arguments]  # fmt: skip

    def read(self, model: nn.Module, given: Mapping[str, Any], time: Any) -> tuple[Any, Any, Any]:
        """Timestep as Stable Diffusion's, of the pipeline's step if it is known; latent; its tokens, or why not."""
        step = time.noise.now() if isinstance(time.noise, PipelineSteps) and time.is_sampling else None
        timestep = self.family.timestep(given[self.reads[-1]]) if step is None else step
        tokens = self._tokens(model, given)
        if isinstance(tokens, str):
            return timestep, torch.empty(0), tokens
        return timestep, tokens.latent, tokens

    def layout_of(self, now: Call, site: AttentionSite, tokens: int) -> Layout | str:
        """Text may lie before the picture's tokens."""
        if isinstance(now.facts, str):
            return now.facts
        picture: Tokens = now.facts
        return Layout(picture.grid, tokens - picture.count if self.family.text_first else picture.first)
