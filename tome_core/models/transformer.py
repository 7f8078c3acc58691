"""diffusers' transformers (Flux, SD3, Qwen-Image, Wan and others): the known classes, and how their calls are read.

A transformer is recognised by the name of its class; others are not patched. For each class a table says where the
picture's tokens are and what its timestep means. The rest follows from its modules and from the names of its arguments.
"""

from __future__ import annotations

import inspect
import re
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from math import prod
from operator import mul
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from ..engine.decision import ModelCall
from ..engine.scheduler_steps import PipelineSteps
from ..merging.grid import Grid, Layout
from ..reporting.ledger import NO_GRID, LevelTally, Reason
from .outer_wrap import WholeTokensWrap
from .sites import AttentionSite, ModelSite
from .transformer_blocks import TransformerBlockSite, middle
from .weights import per_token
from .wrap import Wrap
from .wrap_set import Ways

_BLOCK = re.compile(r"\w+\.\d+")  # the path of a block in a model, at the beginning of its attentions' paths
REFERENCES = Reason("the call has reference pictures")
UNEVEN = Reason("its pictures are of different sizes")


class Tokens(NamedTuple):
    """The picture's tokens in one call."""

    grid: Grid
    count: int  # number of tokens from the picture's first on, also of references, which follow the picture
    # (batch, channels, [frames,] height, width), maybe one pixel for each token; used only to find copies in the batch
    latent: torch.Tensor
    first: int = 0  # number of tokens of earlier frames before the picture's


class Family(NamedTuple):
    """The facts of a class of transformers that neither its calls nor its modules show."""

    text_first: bool = False  # the text is before the picture's tokens
    # converts the model's time to a timestep of Stable Diffusion: 1000 times the sigma of a flow model
    timestep: Callable[[Any], Any] = lambda time: time
    downsample: int = 2  # side of a token, in pixels of the latent
    # regular expression for the whole paths of the attentions over the picture's tokens
    attentions: str = r"\w*(blocks|layers|noise_refiner)\.\d+\.(block\.)?(attn1?|attention)"


# Each reader takes the model and the arguments of its call by name. It returns the picture's tokens, or the reason why
# they are unknown.


def _read_latent(model: nn.Module, given: Mapping[str, Any]) -> Tokens:
    """Read most classes' calls: the latent's size, divided by the patch size of the model's config, is the grid.

    CogVideoX has frames before channels: its second axis is not ``config.in_channels``.
    """
    latent, config = given["hidden_states"], model.config
    if latent.dim() == 5 and latent.shape[1] != config.in_channels:
        latent = latent.transpose(1, 2)
    size, patch_frames = config.patch_size, getattr(config, "patch_size_t", None) or 1
    patch_frames, down, right = (patch_frames, size, size) if isinstance(size, int) else (1, *size)[-3:]
    frames = 1 if latent.dim() == 4 else latent.shape[2] // patch_frames
    height, width = latent.shape[-2] // down, latent.shape[-1] // right
    return Tokens(Grid(frames * height, width, frames), frames * height * width, latent)


def _read_history(model: nn.Module, given: Mapping[str, Any]) -> Tokens:
    """Read FramePack's call: as `_read_latent`, after films of earlier frames, in larger patches the older they are."""
    history = [(given[name], factor) for name, factor in zip(_HISTORY, (4, 2, 1), strict=False)]
    patches = [(film.shape[2:], (factor, 2 * factor, 2 * factor)) for film, factor in history if film is not None]
    before = sum(prod(-(-side // size) for side, size in zip(*sides, strict=True)) for sides in patches)
    return _read_latent(model, given)._replace(first=before)


def _read_ids(model: nn.Module, given: Mapping[str, Any]) -> Tokens | Reason:
    """Read Flux's or Krea 2's call: ids of picture, row and column show the grid, or `NO_GRID` is returned.

    References follow the picture. Krea 2's ids begin with those of the text. `Tokens.latent` gets 2 x 2 pixels for each
    token if ``config.patch_size`` is 1 or missing and the channels are a multiple of 4, at least 16; else one pixel.
    """
    packed = given["hidden_states"]
    shape = _grid_of_ids(given["img_ids"] if "img_ids" in given else given["position_ids"], packed.shape[1])
    if shape is None:
        return NO_GRID
    places = packed[:, : shape[0] * shape[1]].unflatten(1, shape)
    latent = places.movedim(3, 1)
    if packed.shape[2] % 4 == 0 and getattr(model.config, "patch_size", 1) == 1 and packed.shape[2] >= 16:
        latent = places.unflatten(3, (-1, 2, 2)).permute(0, 3, 1, 4, 2, 5).flatten(4).flatten(2, 3)
    return Tokens(Grid(*shape), packed.shape[1], latent)


# For each tensor of ids: its version, and its grid or None. Reading waits for the device; all steps have one tensor.
_GRIDS: WeakIdKeyDictionary = WeakIdKeyDictionary()


def _grid_of_ids(ids: torch.Tensor, count: int) -> tuple[int, int] | None:
    """Return `_read_grid` of the last `count` ids ``([batch,] tokens, 3)``, cached until the tensor is written to."""
    version = None if ids.is_inference() else (ids._version, count)  # inference tensors do not count writes
    known = _GRIDS.get(ids)
    if known is None or version is None or known[0] != version:
        known = _GRIDS[ids] = version, _read_grid(ids.detach().flatten(0, -2)[-count:].cpu())
    return known[1]


def _read_grid(ids: torch.Tensor) -> tuple[int, int] | None:
    """Return the first picture's (height, width) by ids ``(tokens, 3)``: picture, row, column; None without a grid."""
    picture = ids[: int((ids[:, 0] == ids[0, 0]).long().cumprod(0).sum())]
    width = int((picture[:, 1] == picture[0, 1]).long().cumprod(0).sum())
    if len(picture) % width:
        return None
    places = picture.unflatten(0, (-1, width))
    is_grid = (places[:, :, 1] == places[:, :1, 1]).all() and (places[:, :, 2] == places[:1, :, 2]).all()
    return (len(picture) // width, width) if is_grid else None


def _read_shapes(model: nn.Module, given: Mapping[str, Any]) -> Tokens | Reason:
    """Read Qwen-Image's call: for each sample, the (frames, height, width) of the picture, or of it and references."""
    shapes = given["img_shapes"]
    if not shapes:
        return NO_GRID
    if any(shape != shapes[0] for shape in shapes):
        return UNEVEN
    frames, height, width = shapes[0][0] if isinstance(shapes[0], list) else shapes[0]
    packed = given["hidden_states"]
    places = packed[:, : frames * height * width].unflatten(1, (frames * height, width)).movedim(3, 1)
    return Tokens(Grid(frames * height, width, frames), packed.shape[1], places)


def _read_list(model: nn.Module, given: Mapping[str, Any]) -> Tokens | Reason:
    """Read Z-Image's call: a list of latents ``(channels, frames, height, width)``, one for each sample."""
    latents = given["x"]
    if not all(torch.is_tensor(latent) for latent in latents):
        return REFERENCES
    if any(latent.shape != latents[0].shape for latent in latents):
        return UNEVEN
    _, frames, height, width = latents[0].shape
    size, patch_frames = given["patch_size"], given["f_patch_size"]
    frames, height, width = frames // patch_frames, height // size, width // size
    return Tokens(Grid(frames * height, width, frames), frames * height * width, torch.stack(list(latents)))


def _read_film(model: nn.Module, given: Mapping[str, Any]) -> Tokens | Reason:
    """Read LTX's call, whose arguments are frames, height and width in tokens; `NO_GRID` if they do not fit."""
    frames, height, width, packed = (given[name] for name in _FILM[:4])
    if None in (frames, height, width) or frames * height * width != packed.shape[1]:
        return NO_GRID
    latent = packed.unflatten(1, (frames, height, width)).movedim(4, 1)
    return Tokens(Grid(frames * height, width, frames), packed.shape[1], latent)


_FILM = ("num_frames", "height", "width", "hidden_states")
_HISTORY = ("latents_history_4x", "latents_history_2x", "latents_clean", "hidden_states")
TIMES = ("timestep", "timesteps", "t")
# Readers by the arguments that they need. A class is read by the first one whose arguments its forward has.
_READERS: dict[tuple[str, ...], Callable[[nn.Module, Mapping[str, Any]], Tokens | Reason]] = {
    ("img_ids", "txt_ids", "hidden_states"): _read_ids, ("position_ids", "hidden_states"): _read_ids,
    ("img_shapes", "hidden_states"): _read_shapes, ("x", "patch_size", "f_patch_size"): _read_list,
    _FILM: _read_film, _HISTORY: _read_history, ("hidden_states",): _read_latent,
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


def family_of(model: Any) -> Family | None:
    """Return the family of a transformer by the name of its class or of a base class; None for any other object."""
    if not isinstance(model, nn.Module):
        return None
    return next((FAMILIES[kind.__name__] for kind in type(model).__mro__ if kind.__name__ in FAMILIES), None)


def find_transformers(model: Any) -> list[nn.Module]:
    """Return those of the model, its ``transformer`` and its ``transformer_2`` that are known, without wrappers."""
    # Wan 2.2 has two, for early and for late steps
    candidates = (model, getattr(model, "transformer", None), getattr(model, "transformer_2", None))
    modules = (getattr(module, "_orig_mod", module) for module in candidates)  # without torch.compile's wrapper
    return [module for module in modules if family_of(module) is not None]


def find_attentions(model: nn.Module, family: Family) -> list[tuple[str, nn.Module]]:
    """Return path and module of each attention whose whole path matches `family.attentions`, in the modules' order."""
    return [(path, module) for path, module in model.named_modules() if re.fullmatch(family.attentions, path)]


class TransformerAdapter:
    """The adapter of a transformer of a known family: it finds the attentions and reads the model's calls.

    Its methods take the model as an argument, because the adapter does not hold it. For what `UNetAdapter` does too,
    see there; `reads` are the names of the arguments that a call is read from, the timestep's the last.
    """

    curve, outside = "transformer", 0.0

    def __init__(self, model: nn.Module) -> None:
        self.family = family_of(model)
        self.downsamples = [self.family.downsample]
        self._blocks, self._model = len(find_attentions(model, self.family)), weakref.ref(model)
        parameters = inspect.signature(type(model).forward).parameters.values()
        known = {parameter.name: (place - 1, parameter.default) for place, parameter in enumerate(parameters)}
        names, self._read_tokens = next(reader for reader in _READERS.items() if known.keys() >= {*reader[0]})
        self.reads = (*names, next(name for name in TIMES if name in known))
        self._arguments = [(name, *known.get(name, (sys.maxsize, None))) for name in self.reads]  # else by name alone

    def tallies(self) -> list[LevelTally]:
        """Return one empty tally with the number of attentions: all see the same tokens, so the model has one level."""
        model = self._model()
        attentions = [module for _, module in find_attentions(model, self.family)]
        channels = max((getattr(getattr(one, "to_q", None), "out_features", 0) for one in attentions), default=0)
        weights = per_token(model) // max(1, self._blocks)
        return [LevelTally(self.family.downsample, self._blocks, channels=channels, per_token=weights)]

    def wraps(self, model: nn.Module, ways: Ways, make: Callable) -> Iterator[Wrap]:
        """Yield a wrap for the model, then for each attention, in the order of the modules; see `UNetAdapter.wraps`.

        If whole blocks may merge, blocks have a wrap too, those that keep all tokens only around compiled code.
        """
        yield make(ModelSite, model)
        attentions = find_attentions(model, self.family)
        blocks = dict.fromkeys(_BLOCK.match(path)[0] for path, _ in attentions if "refiner" not in path)
        merging, blocks = middle([*blocks]), blocks if "blocks" in ways.get(0, ()) else {}
        for path, module in attentions:
            block = _BLOCK.match(path)[0]
            if block in blocks and block in merging:
                yield make(TransformerBlockSite, model.get_submodule(block), block)
            elif block in blocks:
                yield make(WholeTokensWrap, model.get_submodule(block))
            blocks.pop(block, None)
            yield make(AttentionSite, module, path, 0)

    def pick(self, model: nn.Module, args: tuple, kwargs: Mapping[str, Any]) -> list[Any]:
        """Return the arguments named in `reads`, or their defaults, in that order. A compiler can trace this."""
        return [kwargs[name] if name in kwargs else args[place] if place < len(args) else default
                for name, place, default in self._arguments]  # fmt: skip

    def read(self, model: nn.Module, given: Mapping[str, Any], time: Any) -> tuple[Any, Any, Any]:
        """Return timestep, latent and facts of a call, whose arguments named in `reads` are `given` by name.

        If `time`, a `ModelTime`, knows the scheduler's step in a sampling, the timestep is this element of its
        ``timesteps``, not converted; else it is the argument, converted to Stable Diffusion's. The latent is an empty
        tensor if the tokens are unknown. The facts, for ``ModelCall.facts``, are the `Tokens`, or why they are unknown.
        """
        steps = time.scheduler_steps
        step = steps.now() if isinstance(steps, PipelineSteps) and time.is_sampling else None
        timestep = self.family.timestep(given[self.reads[-1]]) if step is None else step
        tokens = self._read_tokens(model, given)
        return timestep, torch.empty(0) if isinstance(tokens, Reason) else tokens.latent, tokens

    def layout_of(self, call: ModelCall, site: Wrap, tokens: int) -> Layout | Reason:
        """Return the picture's place in a sequence of `tokens`, or why it is unknown or not enough for a block."""
        if isinstance(call.facts, Reason):
            return call.facts
        picture: Tokens = call.facts
        if isinstance(site, TransformerBlockSite) and picture.count > picture.grid.height * picture.grid.width:
            return REFERENCES
        return Layout(picture.grid, tokens - picture.count if self.family.text_first else picture.first)
