"""An error at every callback of the hosts leaves nothing merged: ComfyUI's clean up, in a webui the next job does."""

from contextlib import nullcontext
from itertools import product

import pytest
import torch

from comfy_nodes import branch, slot_function
from comfy_nodes.host import hosting
from tests import webui_doubles
from tests.comfy_doubles import Guider, apply, least_checkpoint
from tests.thoroughness import some_quick
from tests.traces import traces
from tests.webui_doubles import FLAVOURS, Webui, custom
from tests.webui_modules import HOOKS, SAMPLING_HOOK
from tome_core.engine.state import State

VALUES = {"level": "up to /8", "end": 0.9}
WEBUI_ON = custom(0.5, **VALUES, merge_crossattn=True, merge_mlp=True)
# functions that a sampling in ComfyUI, or a model's call there, runs through; all but the first are ours
IN_COMFYUI = ((Guider, "_call"), (branch.Sampling, "call"), (branch.Sampling, "_make"), (branch.Sampling, "_tell_time"),
              (State, "begin"), (slot_function, "call"), (hosting, "attend_call"), (State, "attend"),
              (branch.Sampling, "end"))  # fmt: skip


def failing(function, error, after):
    """The function, which raises once, before or after its work; then `raised` is true."""
    def run(*args, **kwargs):
        out = function(*args, **kwargs) if after or run.raised else None
        if not run.raised:
            run.raised = True
            raise error("by the test")
        return out

    run.raised = False
    return run


@pytest.fixture(params=some_quick(FLAVOURS))
def webui(request, monkeypatch):
    """A webui whose `draw` returns the picture with or without merging, and asserts that nothing is left."""
    webui_doubles.be_short(monkeypatch)
    webui = Webui(monkeypatch, request.param).start()
    before = traces(webui.unet)

    def draw(merges, **more):
        latents = webui.job(WEBUI_ON if merges else False, enable_hr=True, **more).latents
        assert traces(webui.unet) == before
        return latents

    webui.draw, webui.pictures = draw, (draw(False), draw(True))
    assert not torch.equal(*webui.pictures) and not webui.errors
    yield webui
    webui.call("script_unloaded")


@pytest.mark.parametrize("error, after", [(RuntimeError, False), (KeyboardInterrupt, True)])
def test_a_fault_in_any_callback_leaves_nothing_merged(webui, error, after, monkeypatch):
    """The webui reports an Exception of a script's callback and goes on; nothing else is caught."""
    for name in (*HOOKS, SAMPLING_HOOK, "postprocess"):
        with monkeypatch.context() as context:
            broken = failing(getattr(webui.script, name), error, after)
            context.setattr(webui.script, name, broken, raising=False)
            with pytest.raises(KeyboardInterrupt) if error is KeyboardInterrupt else nullcontext():
                webui.draw(True)
        assert broken.raised
        assert all(map(torch.equal, map(webui.draw, (False, True)), webui.pictures)), name


def test_a_fault_in_mid_sampling_is_gone_with_the_next_job(webui):
    with pytest.raises(RuntimeError, match="by the test"):
        webui.draw(True, at_step=failing(lambda step: None, RuntimeError, after=False))
    assert all(map(torch.equal, map(webui.draw, (False, True)), webui.pictures))


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_fault_in_comfyui_leaves_nothing(error, monkeypatch):
    """Only the picture with the fault fails. An attention that fails merged goes on unmerged."""
    plain = least_checkpoint()
    branches = plain, apply(plain, ratio=0.5, **VALUES)

    def drawn():
        return [Guider(branch).sample(steps=2, size=(8, 8)) for branch in branches]

    before, pictures = traces(plain.model), drawn()
    for (owner, name), after in product(IN_COMFYUI, (False, True)):
        broken, goes_on = failing(getattr(owner, name), error, after), (name, error) == ("attend", RuntimeError)
        with monkeypatch.context() as context:
            context.setattr(owner, name, broken)
            with nullcontext() if goes_on else pytest.raises(error, match="by the test"):
                Guider(branches[1]).sample(steps=2, size=(8, 8))
        assert broken.raised and traces(plain.model) == before
        assert all(map(torch.equal, drawn(), pictures)), (name, after)
