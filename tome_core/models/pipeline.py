"""What is wrapped of a diffusers pipeline: the loop that makes a picture."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any

import torch

from ..engine.plan_cache import Guidance
from ..engine.time import ModelTime
from .wrap import Wrap

_GUIDES = ("do_classifier_free_guidance", "do_perturbed_attention_guidance")


class SamplingScope(Wrap):
    """Around ``pipeline.progress_bar``, which brackets every pipeline's loop: one picture, or one batch of them."""

    def __init__(self, pipeline: Any, time: ModelTime) -> None:
        super().__init__(pipeline, "progress_bar")
        self.time = time

    @property
    def target(self) -> Any:
        """The pipeline, held weakly, because it holds the UNet; None once it is gone."""
        return None if self._target is None else self._target()

    @target.setter
    def target(self, pipeline: Any) -> None:
        self._target = None if pipeline is None else weakref.ref(pipeline)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """The pipeline's bar, whose ``with`` or iteration is a sampling."""
        bar = self.original(*args, **kwargs)
        continues = getattr(self._target(), "denoising_start", None) is not None  # what another pipeline has begun
        return _Bar(bar, partial(self.time.sample, partial(_guidance, self._target), continues=continues))


def _guidance(pipeline: weakref.ref[Any], batch: torch.Tensor) -> Guidance | None:
    """Where a pipeline says that it guides, its batch is for the negative prompt, the prompt, and the perturbed one."""
    by_prompt, by_perturbing = (bool(getattr(pipeline(), name, False)) for name in _GUIDES)
    copies = 1 + by_prompt + by_perturbing
    return (len(batch) // copies, int(by_prompt)) if copies > 1 and len(batch) % copies == 0 else None


class _Bar:
    """A progress bar that begins and ends a sampling with itself."""

    def __init__(self, bar: Any, sampling: Callable[[], AbstractContextManager[None]]) -> None:
        self._bar, self._sampling, self._scope = bar, sampling, ExitStack()

    def __enter__(self) -> Any:
        self._scope.enter_context(self._sampling())
        return self._scope.enter_context(self._bar)

    def __exit__(self, *error: Any) -> Any:
        return self._scope.__exit__(*error)

    def __iter__(self) -> Iterator[Any]:
        with self._sampling():
            yield from self._bar

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bar, name)
