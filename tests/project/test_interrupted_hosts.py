"""An error, an interrupt or a full memory at every callback and wrapper of the hosts leaves nothing merged behind.

A webui calls nothing after an error in sampling, so there it is the next job that cleans up; ComfyUI's wrappers clean
up by themselves.
"""

from __future__ import annotations

from contextlib import nullcontext
from itertools import product

import pytest
import torch

from comfy_nodes import asking, branch
from comfy_nodes.host import hosting
from tests import webui_doubles
from tests.comfy_doubles import Guider, ModelPatcher, apply, least_checkpoint
from tests.injected_faults import MOST_ERRORS, Fault, places
from tests.thoroughness import some_quick
from tests.traces import traces
from tests.webui_doubles import FLAVOURS, Webui, custom, merges
from tests.webui_modules import HOOKS, SAMPLING_HOOK
from tome_core.engine.state import State

CALLBACKS = (*HOOKS, SAMPLING_HOOK, "postprocess", "cfg_denoiser")
VALUES = {"level": "up to /8", "end": 0.9}
WEBUI_ON = (custom(0.5, **VALUES, merge_crossattn=True, merge_mlp=True),)
COMFY_ON = {"ratio": 0.5, **VALUES}


class Failing:
    """A function that raises once, before or after its work."""

    def __init__(self, function, error, after):
        self.function, self.error, self.after, self.raised = function, error, after, False

    def __call__(self, *args, **kwargs):
        out = self.function(*args, **kwargs) if self.after or self.raised else None
        if not self.raised:
            self.raised = True
            raise self.error("by the test")
        return out


# --- the webuis ------------------------------------------------------------------------------------------------------


@pytest.fixture(params=some_quick(FLAVOURS))
def webui(request, monkeypatch):
    webui_doubles.be_short(monkeypatch)
    webui = Webui(monkeypatch, request.param).start()
    webui.before = traces(webui.unet)
    webui.plain = webui.job(False, enable_hr=True).latents
    webui.merged = webui.job(*WEBUI_ON, enable_hr=True).latents
    assert not torch.equal(webui.plain, webui.merged) and not webui.errors
    yield webui
    webui.call("script_unloaded")


def is_clean(webui) -> bool:
    return not merges(webui.unet) and traces(webui.unet) == webui.before


def assert_next_jobs_are_as_ever(webui, where: str) -> None:
    assert torch.equal(webui.job(False, enable_hr=True).latents, webui.plain) and is_clean(webui), where
    assert torch.equal(webui.job(*WEBUI_ON, enable_hr=True).latents, webui.merged) and is_clean(webui), where


def fail_at(webui, name: str, error, after: bool, monkeypatch) -> Failing:
    """Let one callback of ours raise; the webui reports an Exception of it and goes on."""
    if name != "cfg_denoiser":
        failing = Failing(getattr(webui.script, name), error, after)
        monkeypatch.setattr(webui.script, name, failing, raising=False)
        return failing
    failing = Failing(webui.callbacks[name][0], error, after)

    def reported(params):
        try:
            failing(params)
        except Exception as caught:
            webui.errors.append(caught)

    monkeypatch.setitem(webui.callbacks, name, [reported])
    return failing


# the webui swallows an Exception, and nothing else
FAULTS = ((RuntimeError, False), (KeyboardInterrupt, True))


@pytest.mark.parametrize("error, after", FAULTS)
def test_a_fault_in_any_callback_leaves_nothing_merged(webui, error, after, monkeypatch):
    for name in CALLBACKS:
        with monkeypatch.context() as context:
            failing = fail_at(webui, name, error, after, context)
            try:
                webui.job(*WEBUI_ON, enable_hr=True)
                assert is_clean(webui), f"{name}: the job went on to its end, and something is left"
            except KeyboardInterrupt:
                assert error is KeyboardInterrupt
            assert failing.raised
        assert_next_jobs_are_as_ever(webui, name)


def test_a_fault_inside_the_model_is_gone_with_the_next_job(webui):
    def break_it(step):
        if step == 1:
            wraps = places(webui.part("merging").armed.handle)["BlockAttentionSite"]
            faults.append(Fault(wraps[-1], RuntimeError, after=True))

    faults: list[Fault] = []
    with pytest.raises(RuntimeError, match="by the test"):
        webui.job(*WEBUI_ON, enable_hr=True, at_step=break_it)
    assert faults[0].gone()
    assert_next_jobs_are_as_ever(webui, "the model")


# --- ComfyUI ---------------------------------------------------------------------------------------------------------

# what a call of the model, and a sampling, come by
OURS = ((branch.Sampling, "call"), (branch.Sampling, "_make"), (branch.Sampling, "_tell_time"), (State, "begin"),
        (asking, "call"), (hosting, "answer"), (State, "attend"), (branch.Sampling, "end"))  # fmt: skip


def sample(patcher: ModelPatcher) -> torch.Tensor:
    return Guider(patcher).sample(steps=2, size=(8, 8))


@pytest.fixture(scope="module")
def comfy():
    class Comfy:
        plain = least_checkpoint()
        applied = apply(plain, **COMFY_ON)
        before = traces(plain.model)
        picture = sample(plain)
        merged = sample(applied)

    assert not torch.equal(Comfy.picture, Comfy.merged)
    return Comfy


def assert_untouched(comfy, where: object) -> None:
    """The shared model has nothing on it, other branches do not merge, and this one goes on as before."""
    assert traces(comfy.plain.model) == comfy.before, where
    assert torch.equal(sample(comfy.plain), comfy.picture) and torch.equal(sample(comfy.applied), comfy.merged), where
    assert traces(comfy.plain.model) == comfy.before, where


@pytest.mark.parametrize("error", MOST_ERRORS)
def test_a_fault_in_a_wrapper_beside_ours_leaves_nothing(comfy, error):
    for where in product(("apply_model", "outer_sample"), ("around us", "inside us"), (False, True)):
        kind, place, after = where

        def broken(executor, *args, after=after, **kwargs):
            if after:
                executor(*args, **kwargs)
            raise error("by the test")

        patcher = comfy.applied.clone()
        wrappers, other = patcher.wrappers[kind], {"other": [broken]}
        patcher.wrappers[kind] = {**wrappers, **other} if place == "inside us" else {**other, **wrappers}
        with pytest.raises(error, match="by the test"):
            sample(patcher)
        assert_untouched(comfy, where)


@pytest.mark.parametrize("error", MOST_ERRORS)
def test_a_fault_of_our_own_leaves_nothing(comfy, error, monkeypatch):
    """The picture fails with it, and nothing else does; an attention that fails merged goes on unmerged."""
    for (owner, name), after in product(OURS, (False, True)):
        failing, goes_on = Failing(getattr(owner, name), error, after), (name, error) == ("attend", RuntimeError)
        with monkeypatch.context() as context:
            context.setattr(owner, name, lambda *args, failing=failing, **kwargs: failing(*args, **kwargs))
            with nullcontext() if goes_on else pytest.raises(error, match="by the test"):
                sample(comfy.applied)
        assert failing.raised
        assert_untouched(comfy, (name, after))
