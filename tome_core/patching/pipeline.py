"""The loop of a diffusers pipeline: each picture's sampling begins and ends with the pipeline's progress bar."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any

import torch

from ..engine.sampling import Guidance
from ..engine.time import ModelTime
from ..models.wrap import Wrap

_GUIDES = ("do_classifier_free_guidance", "do_perturbed_attention_guidance")  # a pipeline's properties


class SamplingScope(Wrap):
    """A replacement of ``pipeline.progress_bar``: every diffusers pipeline runs the steps of its pictures in it."""

    def __init__(self, pipeline: Any, time: ModelTime) -> None:
        super().__init__(pipeline, "progress_bar")
        self.time = time

    @property
    def target(self) -> Any:
        """The pipeline, referenced weakly because it holds the UNet; None if it is gone."""
        return None if self._target is None else self._target()

    @target.setter
    def target(self, pipeline: Any) -> None:
        """Reference a pipeline weakly; None drops the reference."""
        self._target = None if pipeline is None else weakref.ref(pipeline)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Return the pipeline's progress bar in a `_Bar`: a new sampling, or the rest of another pipeline's."""
        bar = self.original(*args, **kwargs)
        continues = getattr(self._target(), "denoising_start", None) is not None  # another pipeline began it
        return _Bar(bar, partial(self.time.sample, partial(_guidance, self._target), continues=continues))


def _guidance(pipeline: weakref.ref[Any], batch: torch.Tensor) -> Guidance | None:
    """Return (number of pictures, index of the prompt's copy) for the latents of a call; None without guidance."""
    # a batch holds the copies for the negative prompt, the prompt, and perturbed attention, in this order
    by_prompt, by_perturbing = (bool(getattr(pipeline(), name, False)) for name in _GUIDES)
    copies = 1 + by_prompt + by_perturbing
    return (len(batch) // copies, int(by_prompt)) if copies > 1 and len(batch) % copies == 0 else None


class _Bar:
    """A progress bar; its ``with`` or iteration is a sampling, inside the context manager ``sampling()`` returns."""

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
