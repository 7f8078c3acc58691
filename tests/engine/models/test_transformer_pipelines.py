"""Whole pipelines of diffusers' transformers: which step they are at, and that none waits for the device."""

import pytest
import torch
from torch.overrides import TorchFunctionMode

import tome_core
from tests.small_models.transformer_pipelines import PRESENT, draw, make
from tests.thoroughness import some_quick
from tests.watching.operators import OperatorCounter
from tome_core.engine.scheduler_steps import PipelineSteps
from tome_core.engine.time import FEW
from tome_core.models import transformer
from tome_core.reporting.ledger import NOT_NOW

WAITS = ("_local_scalar_dense", "nonzero", "equal", "masked_select", "is_nonzero")
# not counted in pipelines that read masks in each attention, or whose scheduler does not count its steps
READS = (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.cpu)
WAITING = ("Qwen-Image", "Flux", "Z-Image", "SD3.5", "Wan, image to video", "LTX")
# a transformer's time has a meaning of its own in each family of `tome_core.models.transformer`
TIMED = ("Mochi", "Flux", "Z-Image", "PixArt sigma", "Lumina 2", "SD3.5", "LTX", "Wan", "HiDream")


def pipelines(names: tuple[str, ...], quick: int) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("name", some_quick([name for name in names if name in PRESENT], quick))


class Reads(TorchFunctionMode):
    """A counter of reads that run no operator, including `.cpu()`, which does nothing on a CPU."""

    count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.count += func in READS
        return func(*args, **(kwargs or {}))


@pipelines(WAITING, 1)
def test_no_step_but_the_first_waits_for_the_device(name):
    pipe, call = make(name)

    def waits(steps: int) -> int:
        with Reads() as reads, OperatorCounter() as seen:
            draw(pipe, call, num_inference_steps=steps)
        return reads.count + sum(seen.by_name[name] for name in WAITS)

    alone = waits(8) - waits(4)
    with tome_core.patch(pipe, "balanced", only_if_it_pays=False):
        assert waits(8) - waits(4) == alone


@pipelines(TIMED, 4)
def test_a_pipelines_steps_are_those_of_its_arguments(name, monkeypatch):
    """They give the same pictures; with few steps only the scheduler knows those to which the early phase is fitted."""
    pipe, call = make(name)
    config = {"ratio": 0.5, "early_ratio": 15 / 16, "early_until": 600.0, "side": "kv", "use_rand": False}
    with tome_core.patch(pipe, **config, keep=100.0):
        counted = draw(pipe, call, num_inference_steps=FEW + 1)
    monkeypatch.setattr(PipelineSteps, "now", lambda steps: None)
    with tome_core.patch(pipe, **config, keep=100.0):
        assert torch.equal(draw(pipe, call, num_inference_steps=FEW + 1), counted)


@pytest.mark.parametrize("denoise, merges", [(1.0, True), (0.3, False)])
def test_a_strength_merges_noisy_steps_so_none_of_a_pass_that_begins_late(denoise, merges, monkeypatch):
    monkeypatch.setattr(transformer, "middle", lambda blocks: blocks)  # the tiny model has few
    pipe, call = make("Flux, image to image")
    with tome_core.patch(pipe, "balanced", only_if_it_pays=False) as handle:
        draw(pipe, call, num_inference_steps=16, strength=denoise)
    assert bool(handle.report().levels[0].block_tokens) == merges
    assert any(NOT_NOW in why for why in handle.report().reasons)
