"""Many generations with other settings each: memory stays flat, and the model ends bit for bit as it began.

60 in each host at every run; `TOME_THOROUGH=1` makes it 500 (see tests/thoroughness.py).
"""

from __future__ import annotations

import gc
import logging
import random
import sys
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from einops import einops

import tome_core
from comfy_nodes.nodes import RemoveToMe, ToMePreview
from tests import webui_doubles
from tests.comfy_doubles import Guider, Server, apply, least_checkpoint
from tests.random_settings import DESCRIBED, any_config, field_value, node_values
from tests.samplings import pipeline_of
from tests.thoroughness import GENERATIONS
from tests.traces import traces
from tests.webui_doubles import Webui
from tome_core import MergeConfig, form

pytestmark = pytest.mark.slow
WARM_UP = GENERATIONS // 3
assert_equal = partial(torch.testing.assert_close, rtol=0, atol=0)
SAMPLES = 5  # of memory, after the warm-up
# bytes: a module's dictionary grows once, by 2.6 KB, with what a patch first puts there; no more in 500 generations
MORE_OBJECTS, MORE_BYTES, MORE_PAGES = 100, 128 * 2**10, 16 * 2**20


class Memory(NamedTuple):
    """What lives: tensors, Python objects of any kind, bytes that Python allocated, bytes of the process."""

    tensors: int
    objects: int
    traced: int
    resident: int | None


def memory() -> Memory:
    einops._reconstruct_from_shape.cache_clear()  # LDM's rearrange remembers 1,024 shapes, and other ratios have others
    for name in [one for one in sys.modules if one.endswith("tome_core.merging.grid")]:  # a webui loads its own engine
        sys.modules[name]._FIXED.clear()  # the splits of 32 grids are remembered, and other settings have others
    while gc.collect():  # what a thread alone knew goes in a second round
        pass
    objects = gc.get_objects()
    tensors = sum(issubclass(type(one), torch.Tensor) for one in objects)
    pages = Path("/proc/self/statm")  # Linux's
    resident = int(pages.read_text().split()[1]) * 4096 if pages.exists() else None
    return Memory(tensors, len(objects), tracemalloc.get_traced_memory()[0], resident)


def soak(generate: Callable[[int], None], rest: Callable[[], None], capsys: Any, host: str) -> None:
    """Run all generations, and hold memory after them against memory after the warm-up. rest: lets go of everything."""
    samples = {WARM_UP + round((GENERATIONS - 1 - WARM_UP) * one / (SAMPLES - 1)) for one in range(SAMPLES)}
    found = []
    logging.disable()  # pytest keeps every record
    try:
        for number in range(GENERATIONS):
            if number == WARM_UP // 2:
                tracemalloc.start(1)
            generate(number)
            if number in samples:
                rest()
                found.append(memory())
    finally:
        tracemalloc.stop()
        logging.disable(logging.NOTSET)
    first, last = found[0], found[-1]
    with capsys.disabled():
        print(f"\n  {host}, {GENERATIONS} generations: {first} ... {last} ", end="")
    # fewer is no leak: what earlier tests left behind may go at any time
    assert all(one.tensors <= first.tensors for one in found), found
    assert last.objects - first.objects <= MORE_OBJECTS, found
    assert last.traced - first.traced <= MORE_BYTES, found
    if first.resident is not None:
        assert last.resident - first.resident <= MORE_PAGES, found


def bits(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A copy of all weights."""
    return {name: value.clone() for name, value in module.state_dict().items()}


# --- random settings -------------------------------------------------------------------------------------------------


def test_random_configs_reach_every_setting():
    dice = random.Random(0)
    configs = [any_config(dice) for _ in range(200)]
    assert all(len({config.value(name) for config in configs}) > 1 for name in DESCRIBED)
    assert {len(any_config(dice, count).rules) for count in (1, 2)} == {1, 2}


# --- a diffusers pipeline --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pipe(tiny_folder) -> Any:
    return pipeline_of(tiny_folder)


def picture(pipe: Any, seed: int = 0, size: tuple[int, int] = (32, 32)) -> torch.Tensor:
    height, width = size
    return pipe("a b", num_inference_steps=2, height=height, width=width, output_type="pt",
                generator=torch.Generator().manual_seed(seed)).images  # fmt: skip


def ways(pipe: Any, dice: random.Random) -> list[Callable[[MergeConfig], None]]:
    """How a patch may come and go around a picture."""
    size = dice.choice([(32, 32), (32, 48), (48, 32)])

    def as_context(config):
        with tome_core.patch(pipe, config) as handle:
            handle.keep_maps(dice.random() < 0.3)
            assert picture(pipe, size=size).isfinite().all() and str(handle.report())

    def nested(config):
        with tome_core.patch(pipe), tome_core.patch(pipe, config):
            picture(pipe, size=size)

    def left_on(config):  # the next patch takes its place
        tome_core.patch(pipe, config)
        picture(pipe, size=size)

    def on_and_off(config):
        handle = tome_core.patch(pipe, config)
        handle.uninstall()
        picture(pipe, size=size)
        handle.install()
        picture(pipe, size=size)
        tome_core.remove_patch(pipe)

    def by_apply_patch(config):
        tome_core.apply_patch(pipe, ratio=config.rules[0].ratio, seed=config.rules[0].seed)
        picture(pipe, size=size)

    return [as_context, nested, left_on, on_and_off, by_apply_patch]


def test_a_pipeline_is_as_it_was_after_all_generations(pipe, capsys):
    unet, dice = pipe.unet, random.Random(1)
    before, weights, plain, on_scheduler = traces(unet), bits(unet), picture(pipe), set(vars(pipe.scheduler))

    def generate(number: int) -> None:
        config = any_config(dice, dice.randint(1, 2))
        dice.choice(ways(pipe, dice))(config)
        if number % 10 == 0:
            tome_core.remove_patch(pipe)
            assert traces(unet) == before and torch.equal(picture(pipe), plain)

    soak(generate, lambda: tome_core.remove_patch(pipe), capsys, "diffusers")
    assert_equal(bits(unet), weights)
    assert traces(unet) == before and set(vars(pipe.scheduler)) == on_scheduler
    assert torch.equal(picture(pipe), plain)


# --- ComfyUI ---------------------------------------------------------------------------------------------------------


def test_a_comfyui_model_is_as_it_was_after_all_generations(capsys, monkeypatch):
    server, dice = Server(), random.Random(2)
    monkeypatch.setitem(sys.modules, "server", server.module())
    plain, other = least_checkpoint(), least_checkpoint()
    before, weights, expected = traces(plain.model), bits(plain.model), Guider(plain).sample(steps=2)
    kept: list[Any] = [plain]  # a graph's cached output

    def generate(number: int) -> None:
        if dice.random() < 0.7:
            kept[0] = apply(plain, **node_values(dice))
        branch = RemoveToMe().remove(kept[0])[0] if dice.random() < 0.1 else kept[0]
        model = other.model if dice.random() < 0.1 else None
        size = dice.choice([(16, 16), (8, 12)])
        assert Guider(branch, model).sample(steps=2, size=size).isfinite().all()
        if dice.random() < 0.2:
            ToMePreview().preview(branch, latent={"samples": torch.zeros(1, 4, *size)}, unique_id="9")
        server.texts.clear()
        if number % 10 == 0:
            assert traces(plain.model) == before and torch.equal(Guider(plain).sample(steps=2), expected)

    soak(generate, lambda: kept.__setitem__(0, plain), capsys, "ComfyUI")
    for model in (plain.model, other.model):
        assert_equal(bits(model), weights)
        assert traces(model) == before
    assert torch.equal(Guider(plain).sample(steps=2), expected)


# --- the webuis ------------------------------------------------------------------------------------------------------


def test_a_webui_model_is_as_it_was_after_all_generations(capsys, monkeypatch):
    webui_doubles.be_short(monkeypatch)
    webui = Webui(monkeypatch).start()
    options, wish = webui.part("options"), webui.part("wish")
    webui.shared.opts.data[options.REPORT] = options.PAGE
    dice, unet = random.Random(3), webui.unet
    before, weights, expected = traces(unet), bits(unet), webui.job(False, enable_hr=True).latents

    def fail(step: Any) -> None:
        raise RuntimeError("by the test")

    def generate(number: int) -> None:
        given = {"enabled": dice.random() < 0.9, "strength": dice.random(), "where": dice.choice(wish.WHERE)}
        args = [given | {one.name: field_value(dice, one) for one in form.FIELDS if dice.random() < 0.25}]
        facts = {"enable_hr": dice.random() < 0.7, "n_iter": dice.randint(1, 2), "seed": dice.randint(0, 2**32)}
        if dice.random() < 0.05:
            with pytest.raises(RuntimeError, match="by the test"):
                webui.job(*args, at_step=fail, **facts)
        else:
            assert webui.job(*args, **facts).latents.isfinite().all() and traces(unet) == before
        if number % 10 == 0:
            assert torch.equal(webui.job(False, enable_hr=True).latents, expected) and traces(unet) == before
        assert not webui.errors

    soak(generate, lambda: webui.job(False) and None, capsys, "webui")  # it keeps an aborted job's patch until the next
    assert torch.equal(webui.job(False, enable_hr=True).latents, expected)
    webui.call("script_unloaded")
    assert_equal(bits(unet), weights)
    assert traces(unet) == before
