"""diffusers' transformers (Flux, SD3, Qwen-Image, Wan and others): which are known, and how their calls are read.

They are known by the names of their classes, and with each the attentions over the picture's tokens, and where those
lie in its sequences. What is not here is not guessed.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from operator import mul
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from ..engine.decision import Call
from ..merging.grid import Grid, Layout
from ..reporting.ledger import LevelTally
from ..settings.schedule import STABLE_DIFFUSION, SchedulerNoise, Time
from .sites import AttentionSite, ModelSite
from .wrap import Wrap

UNEVEN = "its pictures are of different sizes"
NO_GRID = "the picture's tokens are no grid"


class Tokens(NamedTuple):
    """The picture's tokens in one call.

    count: the picture's and those behind it that are of its kind, as references are.
    latent: ``[B, C, (frames,) H, W]``, or a view of as many places; its values are looked at for copies alone.
    """

    grid: Grid
    count: int
    latent: torch.Tensor


class Family(NamedTuple):
    """A family is a class of transformers, and how its calls are read.

    attentions: what the paths of the modules match. tokens: of a call, from its arguments by name; or why not.
    reads: the arguments that are looked at, the time last. text_first: does the text lie before the picture's tokens?
    timestep: of a time; Stable Diffusion's, a flow model's sigma times 1000. downsample: latent places a token, a side.
    """

    attentions: str
    tokens: Callable[[nn.Module, Mapping[str, Any]], Tokens | str]
    reads: tuple[str, ...]
    text_first: bool = False
    timestep: Callable[[Any], Any] = lambda time: time
    downsample: int = 2


def _of_latent(model: nn.Module, given: Mapping[str, Any]) -> Tokens | str:
    """``[B, C, H, W]`` or ``[B, C, frames, H, W]`` in patches."""
    latent, config = given["hidden_states"], model.config
    size = config.patch_size
    along, down, right = (getattr(config, "patch_size_t", 1), size, size) if isinstance(size, int) else (1, *size)[-3:]
    frames = 1 if latent.dim() == 4 else latent.shape[2] // along
    height, width = latent.shape[-2] // down, latent.shape[-1] // right
    return Tokens(Grid(frames * height, width, frames), frames * height * width, latent)


def _of_ids(model: nn.Module, given: Mapping[str, Any]) -> Tokens | str:
    """Flux: ``img_ids [N, 3]``, whose first number is another one for reference pictures; they lie behind."""
    ids, packed = given["img_ids"], given["hidden_states"]
    ids = ids[0] if ids.dim() == 3 else ids
    shape = _grid_of_ids(ids)
    if shape is None:
        return NO_GRID
    places = packed[:, : shape[0] * shape[1]].unflatten(1, shape)
    latent = places.movedim(3, 1)
    if packed.shape[2] % 4 == 0 and getattr(model.config, "patch_size", 1) == 1 and packed.shape[2] >= 16:
        latent = places.unflatten(3, (-1, 2, 2)).permute(0, 3, 1, 4, 2, 5).flatten(4).flatten(2, 3)
    return Tokens(Grid(*shape), ids.shape[0], latent)


_GRIDS: WeakIdKeyDictionary = WeakIdKeyDictionary()  # of tensors of ids: version, and what was found


def _grid_of_ids(ids: torch.Tensor) -> tuple[int, int] | None:
    """Height and width; None if they are no grid. A pipeline gives one tensor at all steps, and one of them waits."""
    version = None if ids.is_inference() else ids._version  # None: whether somebody writes into it cannot be told
    known = _GRIDS.get(ids)
    if known is None or version is None or known[0] != version:
        known = _GRIDS[ids] = version, _read_grid(ids.detach().cpu())
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


_thousandfold = partial(mul, 1000)
_LATENT, _IDS = ("hidden_states", "timestep"), ("img_ids", "hidden_states", "timestep")
_SHAPES, _LIST = ("img_shapes", "hidden_states", "timestep"), ("x", "patch_size", "f_patch_size", "t")
_FILM = ("num_frames", "height", "width", "hidden_states", "timestep")
FAMILIES: dict[str, Family] = {
    "FluxTransformer2DModel": Family(r"(single_)?transformer_blocks\.\d+\.attn", _of_ids, _IDS, True, _thousandfold),
    "SD3Transformer2DModel": Family(r"transformer_blocks\.\d+\.attn2?", _of_latent, _LATENT),
    "QwenImageTransformer2DModel": Family(r"transformer_blocks\.\d+\.attn", _of_shapes, _SHAPES, True, _thousandfold),
    "ZImageTransformer2DModel": Family(
        r"(layers|noise_refiner)\.\d+\.attention", _of_list, _LIST, timestep=lambda time: 1000 * (1 - time)
    ),
    "Lumina2Transformer2DModel": Family(
        r"(layers|noise_refiner)\.\d+\.attn", _of_latent, _LATENT, True, lambda time: 1000 * (1 - time)
    ),
    "WanTransformer3DModel": Family(r"blocks\.\d+\.attn1", _of_latent, _LATENT),
    "HunyuanVideoTransformer3DModel": Family(r"(single_)?transformer_blocks\.\d+\.attn", _of_latent, _LATENT),
    "LTXVideoTransformer3DModel": Family(r"transformer_blocks\.\d+\.attn1", _of_film, _FILM, downsample=1),
    "PixArtTransformer2DModel": Family(r"transformer_blocks\.\d+\.attn1", _of_latent, _LATENT),
}
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
        self.reads = self.family.reads
        self._blocks = len(find_attentions(model, self.family))
        parameters = inspect.signature(type(model).forward).parameters.values()
        known = {one.name: (place - 1, one.default) for place, one in enumerate(parameters)}
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
        """Timestep as Stable Diffusion's, of the pipeline's step if it is known; latent; grid and count, or why not."""
        step = time.noise.now() if isinstance(time.noise, PipelineSteps) and time.is_sampling else None
        timestep = self.family.timestep(given[self.reads[-1]]) if step is None else step
        tokens = self.family.tokens(model, given)
        if isinstance(tokens, str):
            return timestep, torch.empty(0), tokens
        return timestep, tokens.latent, (tokens.grid, tokens.count)

    def layout_of(self, now: Call, site: AttentionSite, tokens: int) -> Layout | str:
        """Text may lie before the picture's tokens."""
        if isinstance(now.facts, str):
            return now.facts
        grid, count = now.facts
        return Layout(grid, tokens - count if self.family.text_first else 0)


class PipelineSteps(SchedulerNoise):
    """At which step a pipeline is, by its scheduler's own count: a timestep among arguments would be waited for.

    A flow model's timesteps are 1000 times its sigma, and stand for Stable Diffusion's of the same number.
    """

    def now(self) -> torch.Tensor | None:
        """Of the next call, an element of its scheduler's timesteps; None if the scheduler does not count."""
        scheduler = self._scheduler()
        steps = getattr(scheduler, "timesteps", None)
        if not hasattr(scheduler, "step_index") or not torch.is_tensor(steps) or steps.dim() != 1:
            return None
        index = scheduler.step_index
        if index is None:  # before the first step
            index = getattr(scheduler, "begin_index", None) or 0
        return steps[index] if index < len(steps) else None

    def steps_of(self, values: list[float]) -> list[Time]:
        """What the scheduler's ``values``, all that its ``timesteps`` hold, stand for."""
        return [STABLE_DIFFUSION.time_of(value) for value in values]
