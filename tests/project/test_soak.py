"""Many generations in each host (`TOME_THOROUGH=1`: 500): memory stays flat, and the model is the same at the end."""

import gc
import logging
import tracemalloc
from collections.abc import Callable

import pytest
import torch

import tome_core
from comfy_nodes.nodes import RemoveToMe, ToMePreview
from tests.host_doubles import webuis
from tests.host_doubles.comfy import Guider, apply, least_checkpoint
from tests.host_doubles.webuis import Webui, custom
from tests.small_models.sd_pipelines import read_folder
from tests.thoroughness import THOROUGH
from tests.watching.traces import traces

pytestmark = pytest.mark.slow
ROUNDS, WARM_UP = 125 if THOROUGH else 6, 2  # a round has up to four generations
MORE_OBJECTS, MORE_BYTES = 12, 48 * 2**10  # since the warm-up; one object for each generation makes 16


def memory() -> tuple[int, int, int]:
    """How many tensors and Python objects live, and how many bytes Python allocated."""
    while gc.collect():  # objects that only a thread held go in a second round
        pass
    objects = gc.get_objects()
    tensors = sum(issubclass(type(value), torch.Tensor) for value in objects)
    return tensors, len(objects), tracemalloc.get_traced_memory()[0]


def soak(*generations: Callable[[], object]) -> None:
    """Run these in turn, and compare memory after each round with memory after the warm-up. The last one frees all."""
    seen = []
    logging.disable()  # pytest keeps every record
    tracemalloc.start(1)
    try:
        for number in range(ROUNDS):
            for generate in generations:
                generate()
            if number >= WARM_UP:
                seen.append(memory())
    finally:
        tracemalloc.stop()
        logging.disable(logging.NOTSET)
    (tensors, objects, traced), (_, last_objects, last_traced) = seen[0], seen[-1]
    # fewer is no leak: objects that earlier tests left behind may go at any time
    assert all(later[0] <= tensors for later in seen), seen
    assert last_objects - objects <= MORE_OBJECTS and last_traced - traced <= MORE_BYTES, seen


def test_a_pipeline_keeps_nothing(tiny_folder):
    pipe = read_folder(tiny_folder)

    def picture(width: int = 32) -> None:
        pipe("a b", num_inference_steps=2, height=32, width=width, output_type="pt")

    def with_maps():
        with tome_core.patch(pipe, strength=0.5) as handle:
            handle.keep_maps()
            picture()
            assert str(handle.report())

    def replaced_and_off_and_on():
        tome_core.patch(pipe, ratio=0.9, refine=1)
        handle = tome_core.patch(pipe, ratio=0.5, merge_crossattn=True, merge_mlp=True)
        handle.uninstall()
        picture()
        handle.install()
        picture(48)

    before, on_scheduler = traces(pipe.unet), set(vars(pipe.scheduler))
    soak(with_maps, replaced_and_off_and_on, lambda: tome_core.remove_patch(pipe))
    assert traces(pipe.unet) == before and set(vars(pipe.scheduler)) == on_scheduler


def test_a_comfyui_model_keeps_nothing(server):
    plain, other = least_checkpoint(), least_checkpoint()
    before = traces(plain.model)

    def another_model_and_another_size():
        branch = apply(plain, ratio=0.5, merge_mlp=True)
        for model, size in ((plain.model, (16, 16)), (other.model, (8, 12))):
            Guider(branch, model).sample(steps=2, size=size)

    def a_preview_and_removed():
        branch = apply(plain, ratio=0.8, end=0.5)
        Guider(branch).sample(steps=2)
        ToMePreview().preview(branch, latent={"samples": torch.zeros(1, 4, 8, 8)}, unique_id="9")
        Guider(RemoveToMe().remove(branch)[0]).sample(steps=2)
        server.texts.clear()

    soak(another_model_and_another_size, a_preview_and_removed)
    assert traces(plain.model) == traces(other.model) == before


def test_a_webui_model_keeps_nothing(monkeypatch):
    webuis.be_short(monkeypatch)
    webui = Webui(monkeypatch).start()
    options, before = webui.part("settings_tab"), traces(webui.unet)
    webui.shared.opts.data[options.REPORT] = options.PAGE

    def failed():
        with pytest.raises(ZeroDivisionError):
            webui.job(custom(0.5), at_step=lambda step: 1 / 0)

    soak(failed, lambda: webui.job({"enabled": True, "strength": 1.0}), lambda: webui.job(custom(0.5), enable_hr=True),
         lambda: webui.job(custom(0.9, merge_mlp=True), n_iter=2), lambda: webui.job(False))  # fmt: skip
    webui.call("script_unloaded")
    assert traces(webui.unet) == before and not webui.errors
