"""A patch is put on as a whole or not at all, keeps nothing alive, and comes off what it was put on."""

import gc
import weakref
from collections.abc import Callable
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import diffusers
import pytest
import torch

import tome_core
from tests.small_models import unets
from tests.small_models.families import MODELS
from tests.small_models.least_pipeline import Pipeline, picture
from tests.watching.traces import is_idle, traces, wraps_of
from tome_core import MergeConfig, NoiseSchedule
from tome_core.engine.scheduler_steps import training_schedule
from tome_core.models import find_models
from tome_core.models.wrap import Wrap, patch_lock
from tome_core.settings.schedule import STABLE_DIFFUSION

CASE = MODELS["sd15"]
EVERYTHING = MergeConfig(ratio=0.5, merge_crossattn=True, merge_mlp=True)
# it needs the time, so that a scheduler matters, and keeps matches, so that the pipeline's loop matters
LATE = MergeConfig(ratio=0.5, start_percent=0.5, keep=100.0)


@pytest.mark.parametrize("is_after", [False, True])
@pytest.mark.parametrize("change", ["install", "uninstall"])
def test_an_interrupt_at_any_wrap_leaves_a_model_that_is_unpatched_or_can_be(change: str, is_after: bool, monkeypatch):
    model, method = CASE.build(), getattr(Wrap, change)

    def interrupted(wrap: Wrap) -> None:
        is_now = next(numbers) == number
        if is_after or not is_now:
            method(wrap)
        if is_now:
            raise KeyboardInterrupt

    before = traces(model)
    with tome_core.patch(model, EVERYTHING) as handle:
        wraps = wraps_of(handle)
    for number in range(len(wraps)):
        numbers = count()
        with monkeypatch.context() as context:
            context.setattr(Wrap, change, interrupted)
            with pytest.raises(KeyboardInterrupt), tome_core.patch(model, EVERYTHING):
                pass
        if change == "uninstall":
            tome_core.remove_patch(model)
        assert traces(model) == before and not patch_lock._is_owned(), number


@pytest.mark.parametrize("is_on", [True, False])
@pytest.mark.parametrize("build, call", [*((MODELS[name].build, MODELS[name].call) for name in ("sd15", "Flux")),
                                         (Pipeline, picture)], ids=["sd15", "Flux", "a pipeline"])  # fmt: skip
def test_neither_a_handle_nor_the_engine_keeps_a_model_alive(build: Callable, call: Callable, is_on: bool):
    """A notebook may keep the handle's name on a machine whose memory holds one model."""
    model = build()
    (network,) = find_models(model)
    handle = tome_core.patch(model)
    for module in network.modules():
        module.forward = partial(module.forward)
    handle = tome_core.patch(model, LATE)  # it has wraps of other kinds, over other programs' wraps
    call(model)
    if not is_on:
        handle.remove()
    last = [module for module in network.modules() if hasattr(module, "to_q")][-1]
    known = [weakref.ref(target) for target in (model, network, last, last.to_q.weight)]
    del model, network, module, last
    gc.collect()
    assert [reference() for reference in known] == [None] * 4
    assert handle.model is None and handle.report().calls
    with pytest.raises(RuntimeError, match="is gone; patch the new one"):
        handle.install()


def test_the_schedule_is_the_pipelines_own_or_the_models():
    betas = diffusers.DDIMScheduler(beta_start=0.001, beta_end=0.02)
    of_a_pipeline = partial(SimpleNamespace, unet=unets.small())
    model = unets.ldm_wrapped()
    model.betas = betas.betas
    for given, expected in ((of_a_pipeline(scheduler=betas), training_schedule(betas)),
                            (model, NoiseSchedule(tuple(betas.betas.tolist()))),
                            (of_a_pipeline(scheduler=SimpleNamespace(scale_model_input=None)), STABLE_DIFFUSION),
                            (of_a_pipeline(scheduler=object()), None), (unets.small(), None)):  # fmt: skip
        handle = tome_core.patch(given, LATE)
        assert handle.knows_schedule == (expected is not None)
        assert handle.clock.schedule == (expected or STABLE_DIFFUSION)


def left_on(pipe: Any, unet: Any, scheduler: Any) -> list[Any]:
    """All that a patch could leave on a pipeline, its UNet and its scheduler."""
    return [sorted(vars(pipe)), traces(unet), type(scheduler), sorted(vars(scheduler))]


@pytest.mark.parametrize("method", ["scale_model_input", "step"])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_error_in_a_pipelines_loop_leaves_nothing_behind(method: str, error: type[BaseException], monkeypatch):
    """The error comes before or after the model's call."""
    pipe = Pipeline()
    plain, before = picture(pipe), left_on(pipe, pipe.unet, pipe.scheduler)
    with tome_core.patch(pipe, LATE) as handle:
        merged = picture(pipe)
        with pytest.raises(error), monkeypatch.context() as broken:
            broken.setattr(type(pipe.scheduler), method, Mock(side_effect=error))
            picture(pipe)
        assert is_idle(handle) and not handle.time._mine.begun and torch.equal(picture(pipe), merged)
    assert left_on(pipe, pipe.unet, pipe.scheduler) == before and torch.equal(picture(pipe), plain)


@pytest.mark.parametrize("swapped", [["scheduler"], ["unet", "scheduler"]], ids=str)
def test_a_patch_comes_off_what_it_was_put_on_if_the_pipeline_has_got_others_since(swapped: list[str]):
    pipe, other = Pipeline(), Pipeline()
    unet, scheduler = pipe.unet, pipe.scheduler
    before = left_on(pipe, unet, scheduler)
    tome_core.patch(pipe, LATE)
    handle = tome_core.patch(pipe, LATE)  # replaces the first patch
    for name in swapped:
        setattr(pipe, name, getattr(other, name))
    handle.remove() if "unet" in swapped else tome_core.remove_patch(pipe)
    assert left_on(pipe, unet, scheduler) == before and not handle.is_installed and traces(pipe.unet) == traces(unet)
