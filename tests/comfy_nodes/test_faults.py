"""A mistake of ours costs no picture in ComfyUI."""

import pytest
import torch

from comfy_nodes.branch import Sampling
from comfy_nodes.nodes import ApplyToMe
from tests.host_doubles.comfy import BaseModel, ModelPatcher, sample
from tests.host_doubles.comfy_models import deep_unet
from tests.small_models.unets import TEXT
from tests.watching.mistakes import failing, functions_in
from tome_core import MergeConfig, MergeRule

BLOCKS = MergeRule(merge_attn=False, merge_blocks=True, ratio=0.75, side="kv", use_rand=False, min_downsample=2)
# what the stand-in for ComfyUI's noise schedule uses of ours
BORROWED = {"NoiseSchedule.sigma_of", "NoiseSchedule.timestep_of_sigma", "value_at", "_place_of"}


def branch() -> ModelPatcher:
    plain = ModelPatcher(BaseModel(deep_unet()))
    rules = BLOCKS, MergeRule(ratio=0.5, side="kv", use_rand=False, max_downsample=1)
    return ApplyToMe().apply(plain, settings=MergeConfig(rules=rules))[0]


@pytest.mark.slow
@torch.inference_mode()
def test_no_function_of_ours_that_fails_in_a_sampling_costs_the_picture():
    merged, tried = sample(branch()), set()
    for function in functions_in(lambda: sample(branch())):
        if function.__qualname__ in BORROWED:
            continue
        applied = branch()
        with failing(function):
            out = sample(applied)
        tried.add(function.__name__)
        assert out.shape == merged.shape and out.isfinite().all(), function.__name__
    assert len(tried) > 60 and {"_begin", "around", "attend_call", "_count_missing"} <= tried, tried


class Cancelled(Exception):
    """A user's interrupt."""


@pytest.mark.parametrize("name", ["Sampling", "Sampling._begin"])
def test_errors_of_others_pass_out_of_our_wrappers(name: str, monkeypatch):
    def interrupt(*_: object) -> None:
        raise Cancelled

    applied = branch()
    monkeypatch.setattr(f"comfy_nodes.branch.{name}", interrupt)
    with pytest.raises(Cancelled):
        sample(applied)
    options = {"wrappers": applied.wrappers}
    with pytest.raises(Cancelled):
        applied.model.apply_model(torch.ones(2, 4, 8, 8), torch.ones(2), torch.ones(2, 7, TEXT), options)


def test_errors_of_others_pass_out_of_the_beginning_of_a_sampling(monkeypatch):
    def interrupt(config: object, time: object = None) -> Sampling:
        if time is not None:
            raise Cancelled
        return Sampling(config)

    monkeypatch.setattr("comfy_nodes.branch.Sampling", interrupt)
    with pytest.raises(Cancelled):
        sample(branch())
