"""Many generations in each host: memory stays flat, and the model ends as it began and draws the same bits.

A few rounds at every run; `TOME_THOROUGH=1` makes it 500 generations (see tests/thoroughness.py).
"""

from __future__ import annotations

import gc
import logging
import sys
import tracemalloc
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

import tome_core
from comfy_nodes.nodes import RemoveToMe, ToMePreview
from tests import webui_doubles
from tests.comfy_doubles import Guider, Server, apply, least_checkpoint
from tests.samplings import pipeline_of
from tests.thoroughness import THOROUGH
from tests.traces import traces
from tests.webui_doubles import Webui, custom

pytestmark = pytest.mark.slow
ROUNDS, WARM_UP = 125 if THOROUGH else 6, 2  # of four generations each
MORE_OBJECTS, MORE_BYTES = 12, 48 * 2**10  # after the warm-up; an object left behind a generation is 16 at least


class Memory(NamedTuple):
    """How many tensors and Python objects live, and how many bytes Python allocated."""

    tensors: int
    objects: int
    traced: int


def memory() -> Memory:
    while gc.collect():  # objects that a thread alone knew go in a second round
        pass
    objects = gc.get_objects()
    tensors = sum(issubclass(type(value), torch.Tensor) for value in objects)
    return Memory(tensors, len(objects), tracemalloc.get_traced_memory()[0])


def soak(generations: list[Callable[[], None]], rest: Callable[[], None]) -> None:
    """Run these in turn, and hold memory after each round against memory after the warm-up. rest: lets go of all."""
    seen = []
    logging.disable()  # pytest keeps every record
    tracemalloc.start(1)
    try:
        for number in range(ROUNDS):
            for generate in generations:
                generate()
            rest()
            if number >= WARM_UP:
                seen.append(memory())
    finally:
        tracemalloc.stop()
        logging.disable(logging.NOTSET)
    first, last = seen[0], seen[-1]
    # fewer is no leak: objects that earlier tests left behind may go at any time
    assert all(later.tensors <= first.tensors for later in seen), seen
    assert last.objects - first.objects <= MORE_OBJECTS and last.traced - first.traced <= MORE_BYTES, seen


def test_a_pipeline_is_as_it_was_after_all_generations(tiny_folder):
    pipe = pipeline_of(tiny_folder)

    def picture(width: int = 32) -> torch.Tensor:
        return pipe("a b", num_inference_steps=2, height=32, width=width, output_type="pt",
                    generator=torch.Generator().manual_seed(0)).images  # fmt: skip

    def with_maps():
        with tome_core.patch(pipe, strength=0.5) as handle:
            handle.keep_maps()
            assert picture().isfinite().all() and str(handle.report())

    def nested():
        with tome_core.patch(pipe), tome_core.patch(pipe, ratio=0.5, merge_crossattn=True, merge_mlp=True):
            picture(48)

    def replaced():
        tome_core.patch(pipe, ratio=0.9, refine=1)
        tome_core.apply_patch(pipe, ratio=0.3)
        picture()

    def off_and_on():
        handle = tome_core.patch(pipe, strength=1)
        handle.uninstall()
        assert torch.equal(picture(), plain)
        handle.install()
        picture(48)

    plain = picture()
    before, on_scheduler = traces(pipe.unet), set(vars(pipe.scheduler))
    soak([with_maps, nested, replaced, off_and_on], lambda: tome_core.remove_patch(pipe))
    assert traces(pipe.unet) == before and set(vars(pipe.scheduler)) == on_scheduler
    assert torch.equal(picture(), plain)


def test_a_comfyui_model_is_as_it_was_after_all_generations(monkeypatch):
    server = Server()
    monkeypatch.setitem(sys.modules, "server", server.module())
    plain, other = least_checkpoint(), least_checkpoint()
    before, expected = traces(plain.model), Guider(plain).sample(steps=2)
    cached: list[Any] = [plain]  # the output of the graph's node

    def sample(model: Any = None, size: tuple[int, int] = (16, 16)) -> None:
        assert Guider(cached[0], model).sample(steps=2, size=size).isfinite().all()

    def queued_with_other_settings():
        cached[0] = apply(plain, ratio=0.5, merge_mlp=True)
        sample()

    def another_size_and_a_preview():
        cached[0] = apply(plain, ratio=0.8, end=0.5)
        sample(size=(8, 12))
        ToMePreview().preview(cached[0], latent={"samples": torch.zeros(1, 4, 8, 12)}, unique_id="9")
        server.texts.clear()

    def removed():
        cached[0] = RemoveToMe().remove(cached[0])[0]
        sample()

    soak([queued_with_other_settings, another_size_and_a_preview, lambda: sample(other.model), removed],
         lambda: cached.__setitem__(0, plain))  # fmt: skip
    for patcher in (plain, other):
        assert traces(patcher.model) == before and torch.equal(Guider(patcher).sample(steps=2), expected)


def test_a_webui_model_is_as_it_was_after_all_generations(monkeypatch):
    webui_doubles.be_short(monkeypatch)
    webui = Webui(monkeypatch).start()
    options, unet = webui.part("options"), webui.unet
    webui.shared.opts.data[options.REPORT] = options.PAGE
    before, expected = traces(unet), webui.job(False, enable_hr=True).latents

    def job(*args: Any, **facts: Any) -> None:
        assert webui.job(*args, **facts).latents.isfinite().all() and traces(unet) == before and not webui.errors

    def failed():
        def fail(step: Any) -> None:
            raise RuntimeError("by the test")

        with pytest.raises(RuntimeError, match="by the test"):
            webui.job(custom(0.5), at_step=fail)

    soak([failed, lambda: job({"enabled": True, "strength": 1.0}), lambda: job(custom(0.5), enable_hr=True),
          lambda: job(custom(0.9, merge_mlp=True), n_iter=2)], lambda: job(False))  # fmt: skip
    assert torch.equal(webui.job(False, enable_hr=True).latents, expected)
    webui.call("script_unloaded")
    assert traces(unet) == before
