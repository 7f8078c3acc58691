"""An error, an interrupt or a full memory at every callback and wrapper of the hosts leaves nothing merged behind.

A webui calls nothing after an error in sampling, so there it is the next job that cleans up; ComfyUI's wrappers clean
up by themselves.
"""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from comfy_nodes import asking, branch
from comfy_nodes.host import hosting
from tests import webui_doubles
from tests.comfy_doubles import Guider, ModelPatcher, apply, least_checkpoint
from tests.injected_faults import ERRORS, KINDS, MOST_ERRORS, Fault, places
from tests.thoroughness import THOROUGH
from tests.traces import traces
from tests.webui_doubles import FLAVOURS, Webui, custom, merges
from tests.webui_modules import HOOKS, SAMPLING_HOOK
from tome_core.engine.state import State

MODEL_KINDS = [kind for kind in KINDS if kind not in ("AttentionSite", "SamplingScope")]
CALLED_AGAIN = ("PartSite",)  # with all tokens, if it refuses merged ones
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


@pytest.fixture(params=FLAVOURS)
def webui(request, monkeypatch):
    webui_doubles.be_short(monkeypatch)
    made = Webui(monkeypatch, request.param).start()
    made.before = traces(made.unet)
    made.plain = made.job(False, enable_hr=True).latents
    made.merged = made.job(*WEBUI_ON, enable_hr=True).latents
    assert not torch.equal(made.plain, made.merged) and not made.errors
    yield made
    made.call("script_unloaded")


def is_clean(webui) -> bool:
    return not merges(webui.unet) and traces(webui.unet) == webui.before


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


FAULTS = [(error, after) for error in ERRORS for after in (False, True)]
# an Exception is what the webui swallows, anything else is not
FEW = FAULTS if THOROUGH else [(RuntimeError, False), pytest.param(KeyboardInterrupt, True, marks=pytest.mark.slow)]


@pytest.mark.parametrize(("error", "after"), FEW)
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
        assert torch.equal(webui.job(False, enable_hr=True).latents, webui.plain), name
        assert is_clean(webui), name
        if THOROUGH or name in ("process", "postprocess", "cfg_denoiser"):
            assert torch.equal(webui.job(*WEBUI_ON, enable_hr=True).latents, webui.merged) and is_clean(webui), name


@pytest.mark.parametrize(("error", "after"), FEW)
def test_a_fault_inside_the_model_is_gone_with_the_next_job(webui, error, after):
    for kind in MODEL_KINDS:
        faults = []

        def break_it(step, faults=faults, kind=kind):
            if step == 1:
                faults.append(Fault(places(webui.part("merging").armed.handle)[kind][-1], error, after))

        is_taken = error is RuntimeError and kind in CALLED_AGAIN
        with nullcontext() if is_taken else pytest.raises(error, match="by the test"):
            webui.job(*WEBUI_ON, enable_hr=True, at_step=break_it)
        assert faults[0].gone()
        assert torch.equal(webui.job(False, enable_hr=True).latents, webui.plain) and is_clean(webui), kind
        if THOROUGH or kind in ("ModelSite", "BlockAttentionSite"):
            assert torch.equal(webui.job(*WEBUI_ON, enable_hr=True).latents, webui.merged) and is_clean(webui), kind


# --- ComfyUI ---------------------------------------------------------------------------------------------------------


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


def assert_untouched(comfy) -> None:
    """The shared model has nothing on it, other branches do not merge, and this one goes on as before."""
    assert traces(comfy.plain.model) == comfy.before
    assert torch.equal(sample(comfy.plain), comfy.picture)
    assert torch.equal(sample(comfy.applied), comfy.merged)
    assert traces(comfy.plain.model) == comfy.before


@pytest.mark.parametrize("error", MOST_ERRORS)
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("kind", ["apply_model", "outer_sample"])
@pytest.mark.parametrize("inside", [False, True], ids=["around us", "inside us"])
def test_a_fault_in_a_wrapper_beside_ours_leaves_nothing(comfy, kind, inside, after, error):
    def broken(executor, *args, **kwargs):
        if after:
            executor(*args, **kwargs)
        raise error("by the test")

    patcher = comfy.applied.clone()
    wrappers = patcher.wrappers[kind]
    patcher.wrappers[kind] = {**wrappers, "other": [broken]} if inside else {"other": [broken], **wrappers}
    with pytest.raises(error, match="by the test"):
        sample(patcher)
    assert_untouched(comfy)


# what a call of the model, and a sampling, come by
OURS = ((branch.Sampling, "call"), (branch.Sampling, "_make"), (branch.Sampling, "_tell_time"), (State, "begin"),
        (asking, "call"), (hosting, "answer"), (State, "attend"), (branch.Sampling, "end"))  # fmt: skip


@pytest.mark.parametrize("error", MOST_ERRORS)
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(("owner", "name"), OURS, ids=[name for _, name in OURS])
def test_a_fault_of_our_own_leaves_nothing(comfy, owner, name, after, error, monkeypatch):
    """The picture fails with it, and nothing else does; of an attention that fails merged, it goes on unmerged."""
    failing, goes_on = Failing(getattr(owner, name), error, after), (name, error) == ("attend", RuntimeError)
    with monkeypatch.context() as context:
        context.setattr(owner, name, lambda *args, **kwargs: failing(*args, **kwargs))
        with nullcontext() if goes_on else pytest.raises(error, match="by the test"):
            sample(comfy.applied)
    assert failing.raised
    assert_untouched(comfy)
