"""diffusers' transformers (Flux, SD3, Qwen-Image, Z-Image, Lumina 2, Wan and others): how their calls are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ..merging.layout import Layout
from ..reporting.ledger import LevelTally
from ..settings.noise import SchedulerNoise, Step, by_timestep
from .arguments import arguments_of, pick_arguments
from .sites import AttentionSite, ModelCall, ModelSite, Shared
from .transformer_layouts import Tokens, family_of, find_attentions
from .wrap import Wrap


class TransformerAdapter:
    """What the engine has to know of one transformer of a known family. For its attributes see `unet.UNetAdapter`."""

    layout = "transformer"

    def __init__(self, model: nn.Module) -> None:
        self.family = family_of(model)
        self.downsamples = [self.family.downsample]
        self.reads = self.family.reads
        self._blocks = len(find_attentions(model, self.family))

    def tallies(self) -> list[LevelTally]:
        """One: all of its attentions are over the same tokens."""
        return [LevelTally(self.family.downsample, self._blocks)]

    def wraps(
        self, model: nn.Module, shared: Shared, levels: set[int], around: set[int], make: Callable[..., Wrap]
    ) -> Iterator[Wrap]:
        """What has to be put on the model, the outermost first. make: as of `unet.UNetAdapter.wraps`."""
        yield make(ModelSite, model, shared)
        for path, module in find_attentions(model, self.family):
            yield make(AttentionSite, module, path, 0, shared)

    def arguments(self, model: nn.Module, args: tuple, kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
        """All arguments of a call, by name."""
        return arguments_of(model, args, kwargs)

    def pick(self, model: nn.Module, args: tuple, kwargs: Mapping[str, Any]) -> list[Any]:
        """The arguments of `reads`, in a way that a compiler can follow."""
        return pick_arguments(model, self.reads, args, kwargs)

    def read(self, model: nn.Module, given: Mapping[str, Any], time: Any) -> tuple[Any, Any, Any]:
        """Timestep as Stable Diffusion's, latent, and the picture's grid and tokens, or why there are none.

        The timestep is that of the pipeline's step, else from the call's arguments.
        """
        tokens = self.family.tokens(model, given)
        latent = tokens.latent if isinstance(tokens, Tokens) else torch.empty(0)
        step = time.noise.now() if isinstance(time.noise, PipelineSteps) and time.is_sampling else None
        timestep = self.family.timestep(given) if step is None else step
        return timestep, latent, tokens if isinstance(tokens, str) else (tokens.grid, tokens.count)

    def layout_of(self, now: ModelCall, site: AttentionSite, tokens: int) -> Layout | str:
        """Text may lie before the picture's tokens."""
        if isinstance(now.tokens, str):
            return now.tokens
        grid, count = now.tokens
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

    def steps_of(self, values: list[float]) -> list[Step]:
        """What the scheduler's ``values``, all that its ``timesteps`` hold, stand for."""
        return [by_timestep(value) for value in values]
