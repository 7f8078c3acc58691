"""Whole pipelines of diffusers' transformers: merged, off again, and which step they are at."""

from __future__ import annotations

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import tome_core
from tests.thoroughness import some_quick
from tests.tiny_transformers import STRONG, distance
from tests.traces import attributes
from tests.transformer_pipelines import PRESENT, draw, make, transformers_of
from tome_core.engine.time import FEW
from tome_core.settings.schedule import PipelineSteps

WAITS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::masked_select", "aten::is_nonzero"}
READS = (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.cpu)
pipelines = pytest.mark.parametrize("name", some_quick(PRESENT, 13))


@pipelines
def test_a_pipeline_merges_near_to_itself_and_off_again_gives_the_same_bits(name):
    pipe, call = make(name)
    models = transformers_of(pipe)
    plain, before = draw(pipe, call), [attributes(one) for one in models]
    own = set(vars(pipe))
    with tome_core.patch(pipe, **STRONG, keep=600.0) as handle:
        merged = draw(pipe, call)
        assert torch.equal(draw(pipe, call), merged), "equal seeds, equal pictures"
    assert not torch.equal(merged, plain) and distance(merged, plain) < 0.05
    assert not handle.report().reasons and handle.report().work_saved > 0.8, str(handle.report())
    assert torch.equal(draw(pipe, call), plain)
    assert [attributes(one) for one in models] == before and set(vars(pipe)) == own
    assert not any(tome_core.report(one).patched for one in models)


class Waits(TorchDispatchMode):
    """Counts what a GPU would be waited for; `.cpu()` too, which on a CPU does nothing."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func._schema.name in WAITS
        return func(*args, **(kwargs or {}))


class Reads(TorchFunctionMode):
    """The same of what is read without an operator."""

    count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.count += func in READS
        return func(*args, **(kwargs or {}))


MASKED = ("HunyuanVideo", "HunyuanVideo 1.5", "HunyuanImage", "Krea 2")  # whose masks are looked at in each attention
UNCOUNTED = ("HunyuanDiT",)  # whose scheduler does not count its steps


@pytest.mark.parametrize("name", some_quick([name for name in PRESENT if name not in MASKED + UNCOUNTED], 5))
def test_no_step_but_the_first_waits_for_the_device(name):
    pipe, call = make(name)

    def waits(steps: int) -> int:
        with Reads() as reads, Waits() as seen:
            draw(pipe, call, num_inference_steps=steps)
        return reads.count + seen.count

    steps = (8, 16) if "strength" in call else (4, 8)
    alone = waits(steps[1]) - waits(steps[0])
    with tome_core.patch(pipe, "balanced", only_if_it_pays=False):
        assert waits(steps[1]) - waits(steps[0]) == alone


_IN_TIME = ("Mochi", "Flux", "SD3.5", "Z-Image", "Lumina 2", "Wan", "LTX", "PixArt sigma")
_BESIDE = ("Qwen-Image", "HunyuanVideo", "PixArt alpha", "Flux, image to image", "Wan, image to video",
           "Wan 2.2, of two transformers")  # fmt: skip


@pytest.mark.parametrize("name", some_quick([*_IN_TIME, *(one for one in PRESENT if one not in _IN_TIME + _BESIDE)], 8))
def test_a_pipelines_steps_are_those_of_its_arguments(name, monkeypatch):
    """Told by the scheduler's count, and by the model's own arguments: the same pictures.

    But of few steps, where the early phase is fitted to what the scheduler alone tells.
    """
    pipe, call = make(name)
    steps = FEW + 1
    config = {"ratio": 0.5, "early_ratio": 15 / 16, "early_until": 600.0, "side": "kv", "use_rand": False}
    with tome_core.patch(pipe, **config, keep=100.0):
        counted = draw(pipe, call, num_inference_steps=steps)
    monkeypatch.setattr(PipelineSteps, "now", lambda steps: None)
    with tome_core.patch(pipe, **config, keep=100.0):
        assert torch.equal(draw(pipe, call, num_inference_steps=steps), counted)


def test_a_mark_leaves_as_much_of_a_pass_that_begins_late():
    """Image to image below `balanced`'s boundary: the early phase is fitted to its own steps, as on UNets."""
    pipe, call = make("Flux, image to image")
    with tome_core.patch(pipe, "balanced", only_if_it_pays=False) as handle:
        draw(pipe, call, num_inference_steps=16, strength=0.3)
    assert len({keys for *_, keys in handle.report().levels[0].tokens}) == 2, "early ones, and late ones"
