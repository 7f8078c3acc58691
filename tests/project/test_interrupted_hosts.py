"""An error anywhere in a host's job leaves nothing on the model, at once, and the next pictures are as ever."""

from contextlib import nullcontext
from itertools import product
from unittest.mock import Mock

import pytest
import torch

from comfy_nodes import branch, slot_function
from comfy_nodes.host import hosting
from tests.host_doubles import webuis
from tests.host_doubles.comfy import Guider, apply, least_checkpoint
from tests.host_doubles.webui_modules import HOOKS, SAMPLING_HOOK
from tests.host_doubles.webuis import FLAVOURS, Webui, custom
from tests.thoroughness import some_quick
from tests.watching.traces import attributes, traces
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
    webuis.be_short(monkeypatch)
    webui = Webui(monkeypatch, request.param).start()
    before = traces(webui.unet), attributes(webui.unet)

    def draw(merges, **more):
        try:
            return webui.job(WEBUI_ON if merges else False, enable_hr=True, **more).latents
        finally:
            assert (traces(webui.unet), attributes(webui.unet)) == before

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


@pytest.mark.parametrize(("way", "times"), [("at_step", 5), ("at", 4)])
def test_a_fault_in_any_step_or_around_the_sampling_leaves_nothing(webui, way, times):
    """Steps of both passes, then the postprocessing; before sampling, between the passes, and decoding."""
    for number in range(1, times + 1):
        at_time = Mock(side_effect=[*[None] * (number - 1), RuntimeError("by the test"), *[None] * times])
        with pytest.raises(RuntimeError, match="by the test"):
            webui.draw(True, **{way: at_time})
        assert all(map(torch.equal, map(webui.draw, (False, True)), webui.pictures)), number
    webui.draw(True, **{way: Mock(side_effect=[None] * times)})  # these were all


def test_a_fault_of_ours_around_the_sampling_costs_no_picture(webui, monkeypatch):
    merging, times = webui.part("merging"), webui.part("sampler_times").SamplerTimes
    for owner, name in ((merging, "job_of"), (merging.Pass, "start"), (merging.Pass, "_put_on"), (times, "counts"),
                        (times, "take_off"), (merging.host, "running_unet")):  # fmt: skip
        for after in (False, True):
            with monkeypatch.context() as context:
                broken = failing(getattr(owner, name), ZeroDivisionError, after)
                context.setattr(owner, name, lambda *args, broken=broken: broken(*args))
                webui.draw(True)
            assert broken.raised
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
