"""A patch is put on as a whole or not at all, runs nothing of the model for that, and comes off what it was put on."""

from __future__ import annotations

import functools
import gc
import linecache
import sys
import weakref
from typing import Any

import diffusers
import pytest
import torch
from accelerate import cpu_offload_with_hook
from accelerate.hooks import remove_hook_from_module
from torch import nn

import tome_core
from tests.families import Family, some_models
from tests.models import BY_NAME, call_case, on_small
from tests.thoroughness import THOROUGH
from tests.threads import at_once
from tests.tiny_pipeline import stable_diffusion
from tests.traces import traces
from tome_core import MergeConfig
from tome_core.models.wrap import patch_lock

CASE = BY_NAME["sd15"]
as_a_model = functools.partial(cpu_offload_with_hook, execution_device="cpu")
WRITING = ("wrap.py", "patching/__init__.py")  # whatever writes to a model
# asks for the time, so that a scheduler matters, and keeps, so that the pipeline's loop does
LATE = MergeConfig(ratio=0.5, start_percent=0.5, keep=100.0)


def patched(model) -> bool:
    return any("forward" in vars(module) for module in model.modules()) or "_tome_core_patch" in vars(model)


def lets_no_signal_in(frame, entered: set) -> bool:
    """Is this line event at a ``try``, or at the end of a ``with``? A trace raises there, CPython's signals cannot."""
    here, text = (id(frame), frame.f_lineno), linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip()
    if here in entered:
        entered.discard(here)
        return True
    if text.startswith("with "):
        entered.add(here)
    return text.startswith("try:")


def test_an_interrupt_at_any_line_of_installing_leaves_nothing():
    model = CASE.build()

    def interrupt_at(number):
        seen, entered = 0, set()

        def trace(frame, event, argument):
            nonlocal seen
            if not frame.f_code.co_filename.endswith(WRITING):
                return None
            if event == "line" and lets_no_signal_in(frame, entered):
                return trace
            seen += event == "line"
            if seen == number:
                seen += 1
                raise KeyboardInterrupt
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            with tome_core.patch(model, MergeConfig(ratio=0.5)):
                pass
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        return seen

    lines = interrupt_at(-1)
    for number in range(1, lines, 1 if THOROUGH else max(1, lines // 100)):
        interrupt_at(number)
        tome_core.remove_patch(model)
        assert not patched(model) and not patch_lock._is_owned(), number


def test_two_threads_patch_one_model():
    model, before = CASE.build(), sys.getswitchinterval()

    def work(ratio):
        for _ in range(15):
            with tome_core.patch(model, MergeConfig(ratio=ratio, proportional=False)):
                pass
            tome_core.apply_patch(model, ratio=ratio)
            tome_core.remove_patch(model)

    sys.setswitchinterval(1e-6)
    try:
        at_once(*(functools.partial(work, ratio) for ratio in (0.25, 0.5)))
    finally:
        sys.setswitchinterval(before)
    tome_core.remove_patch(model)
    assert not patched(model)


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
    config, plain = MergeConfig(min_timestep=600), one.build()
    tome_core.patch(plain, config)
    for steps in ((as_a_model, tome_core.patch), (tome_core.patch, as_a_model)):
        model = one.build()
        for put_on in steps:
            put_on(model, *([config] if put_on is tome_core.patch else []))
        for _ in range(3):
            for time in (900, 500):
                assert torch.equal(one.call(model, timestep=time), one.call(plain, timestep=time))
            remove_hook_from_module(model, recurse=True)
            as_a_model(model)
        assert tome_core.report(model).calls == 6 and tome_core.report(model).merged_anything


# --- of a pipeline ----------------------------------------------------------------------------------------------------


def test_a_handle_does_not_keep_a_model_alive(words):
    """A name in a notebook, on a machine whose memory holds one model."""
    for ended in (True, False):
        pipe = stable_diffusion(words)
        unet = pipe.unet
        merging = tome_core.patch(pipe, on_small("balanced"))
        call_case(CASE, unet)
        if ended:
            merging.__exit__()
        known = weakref.ref(unet), weakref.ref(pipe), weakref.ref(unet.conv_in.weight)
        del pipe, unet
        gc.collect()
        assert [model() for model in known] == [None] * 3
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
    plain = call_case(CASE, unet)
    for is_by_handle, swap in ((False, ["scheduler"]), (True, ["scheduler"]), (True, ["unet", "scheduler"])):
        pipe.unet, pipe.scheduler = unet, scheduler
        before = state(pipe, unet, scheduler)
        tome_core.patch(pipe, LATE)
        handle = tome_core.patch(pipe, LATE)  # in the place of the first
        for name in swap:
            setattr(pipe, name, getattr(other, name))
        handle.remove() if is_by_handle else tome_core.remove_patch(pipe)
        assert state(pipe, unet, scheduler) == before and not handle.is_installed
        assert torch.equal(call_case(CASE, unet), plain) and traces(pipe.unet) == traces(unet)
