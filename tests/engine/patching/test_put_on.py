"""A patch is put on as a whole or not at all, runs nothing of the model for that, and comes off what it was put on."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any

import diffusers
import pytest
import torch
from accelerate import cpu_offload_with_hook
from accelerate.hooks import remove_hook_from_module
from torch import nn

import tome_core
from tests import models
from tests.families import Family, some_models
from tests.models import BY_NAME, call_case, on_small
from tests.threads import at_once
from tests.tiny_pipeline import stable_diffusion
from tests.traces import traces, wraps_of
from tome_core import MergeConfig, NoiseSchedule
from tome_core.models.wrap import Wrap, patch_lock
from tome_core.settings.schedule import STABLE_DIFFUSION, own_schedule

CASE = BY_NAME["sd15"]
as_a_model = partial(cpu_offload_with_hook, execution_device="cpu")
EVERYTHING = MergeConfig(ratio=0.5, merge_crossattn=True, merge_mlp=True)
# asks for the time, so that a scheduler matters, and keeps, so that the pipeline's loop does
LATE = MergeConfig(ratio=0.5, start_percent=0.5, keep=100.0)


def interrupted(method: Callable[[Wrap], Any], number: int, is_after: bool) -> Callable[[Wrap], Any]:
    """The method of wraps, whose call of this number is interrupted, before its work or after it."""
    numbers = count()

    def run(wrap: Wrap) -> Any:
        is_now = next(numbers) == number
        found = None if is_now and not is_after else method(wrap)
        if is_now:
            raise KeyboardInterrupt
        return found

    return run


@pytest.mark.parametrize("is_after", [False, True])
@pytest.mark.parametrize("change", ["install", "uninstall"])
def test_an_interrupt_at_any_wrap_leaves_a_model_that_is_unpatched_or_can_be(change: str, is_after: bool, monkeypatch):
    model, method = CASE.build(), getattr(Wrap, change)
    before = traces(model)
    with tome_core.patch(model, EVERYTHING) as handle:
        wraps = wraps_of(handle)
    for number in range(len(wraps)):
        with monkeypatch.context() as context:
            context.setattr(Wrap, change, interrupted(method, number, is_after))
            with pytest.raises(KeyboardInterrupt), tome_core.patch(model, EVERYTHING):
                pass
        if change == "uninstall":
            tome_core.remove_patch(model)
        assert traces(model) == before and not patch_lock._is_owned(), number


def test_two_threads_patch_one_model():
    model, before = CASE.build(), sys.getswitchinterval()
    found = traces(model)

    def work(ratio: float) -> None:
        for _ in range(15):
            with tome_core.patch(model, ratio=ratio, proportional=False):
                pass
            tome_core.apply_patch(model, ratio=ratio)
            tome_core.remove_patch(model)

    sys.setswitchinterval(1e-6)
    try:
        at_once(*(partial(work, ratio) for ratio in (0.25, 0.5)))
    finally:
        sys.setswitchinterval(before)
    tome_core.remove_patch(model)
    assert traces(model) == found


@some_models("sd15", "ldm_sd1", "Flux")
def test_putting_it_on_runs_no_module(one: Family):
    """Nothing is tried out on tokens that are no picture's."""
    model, calls = one.build(), []
    for module in model.modules():
        module.register_forward_pre_hook(lambda module, _: calls.append(type(module).__name__))
    with tome_core.patch(model, MergeConfig()):
        assert not calls
        one.call(model)
    assert calls


@some_models("sd15", "Flux")
def test_a_hook_that_is_renewed_after_every_picture_does_not_cost_the_patch(one: Family):
    """diffusers' model offload removes and renews its hooks then; the time of a call must not get lost."""
    put_on, plain = partial(tome_core.patch, min_timestep=600), one.build()
    put_on(plain)
    for steps in ((as_a_model, put_on), (put_on, as_a_model)):
        model = one.build()
        for step in steps:
            step(model)
        for _ in range(3):
            for time in (900, 500):
                assert torch.equal(one.call(model, timestep=time), one.call(plain, timestep=time))
            remove_hook_from_module(model, recurse=True)
            as_a_model(model)
        assert tome_core.report(model).calls == 6 and tome_core.report(model).merged_anything


def test_what_is_clamped_is_said_when_it_is_put_on(caplog):
    model = CASE.build()
    tome_core.patch(model, ratio=0.75)
    assert not caplog.text
    handle = tome_core.patch(model, ratio=1.0)
    assert "over the cap 0.75" in caplog.text and "over the cap 0.75" in str(handle.report())


# --- of a pipeline ----------------------------------------------------------------------------------------------------


def test_the_schedule_is_the_pipelines_own_or_the_models():
    betas = diffusers.DDIMScheduler(beta_start=0.001, beta_end=0.02)
    of_a_pipeline = partial(SimpleNamespace, unet=models.small())
    model = models.ldm_wrapped()
    model.betas = betas.betas
    for given, expected in (
        (of_a_pipeline(scheduler=betas), own_schedule(betas)), (model, NoiseSchedule(tuple(betas.betas.tolist()))),
        (of_a_pipeline(scheduler=SimpleNamespace(scale_model_input=None)), STABLE_DIFFUSION),
        (of_a_pipeline(scheduler=object()), None), (models.small(), None),
    ):  # fmt: skip
        handle = tome_core.patch(given, LATE)
        assert handle.knows_schedule == (expected is not None)
        assert handle.clock.schedule == (expected or STABLE_DIFFUSION)


def test_a_handle_does_not_keep_a_pipeline_alive(words):
    """A name in a notebook, on a machine whose memory holds one model."""
    pipe = stable_diffusion(words)
    merging = tome_core.patch(pipe, on_small("balanced"))
    call_case(CASE, pipe.unet)
    known = weakref.ref(pipe), weakref.ref(pipe.unet)
    del pipe
    gc.collect()
    assert [model() for model in known] == [None, None]
    assert merging.report().calls == 1 and merging.report().merged_anything
    merging.remove()
    with pytest.raises(RuntimeError, match="is gone; patch the new one"):
        merging.install()


def state(pipe: Any, unet: nn.Module, scheduler: Any) -> list:
    """All that a patch could leave on them."""
    return [type(pipe), sorted(vars(pipe)), traces(unet), type(scheduler), sorted(vars(scheduler))]


def test_a_patch_comes_off_what_it_was_put_on(words):
    """Also if the pipeline has got others since."""
    pipe, other = stable_diffusion(words), stable_diffusion(words)
    unet, scheduler = pipe.unet, diffusers.EulerDiscreteScheduler.from_config(pipe.scheduler.config)
    for is_by_handle, swap in ((False, ["scheduler"]), (True, ["scheduler"]), (True, ["unet", "scheduler"])):
        pipe.unet, pipe.scheduler = unet, scheduler
        before = state(pipe, unet, scheduler)
        tome_core.patch(pipe, LATE)
        handle = tome_core.patch(pipe, LATE)  # in the place of the first
        for name in swap:
            setattr(pipe, name, getattr(other, name))
        handle.remove() if is_by_handle else tome_core.remove_patch(pipe)
        assert state(pipe, unet, scheduler) == before and not handle.is_installed
        assert traces(pipe.unet) == traces(unet)
