"""A UNet inside of something is the UNet itself, and who has patched a model neither holds it nor loses sight of it."""

from __future__ import annotations

import copy
import gc
import weakref
from functools import partial
from typing import Any

import diffusers
import pytest
import torch
from torch import nn

import tome_core
from tests.models import BY_NAME, call_case, ldm_sd1, on_small, small
from tests.tiny_pipeline import stable_diffusion
from tests.traces import traces
from tome_core import MergeConfig, UnsupportedModelError

BALANCED = on_small("balanced")
LATE = MergeConfig(ratio=0.5, start_percent=0.5)  # asks for the time, so that a scheduler matters
run = partial(call_case, BY_NAME["sd15"], timestep=100)


# --- modules around a UNet -------------------------------------------------------------------------------------------


class Wrapper(nn.Module):
    """As DistributedDataParallel: the model under the name `module`, and its calls passed on."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


class Trainer(nn.Module):
    """A program's own: the UNet under a name of its choice, beside what else is trained."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.words = nn.Embedding(3, 32)
        self.parts = nn.ModuleDict({"network": network})

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.parts["network"](*args, **kwargs)


WRAPPERS = {
    "DataParallel": nn.DataParallel,
    "DDP": Wrapper,
    "DDP of a DataParallel": lambda model: Wrapper(nn.DataParallel(model)),
    "a trainer": Trainer,
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_wrapped_unet_merges_as_the_unet_itself_whichever_is_called(wrapper: str):
    model = small()
    with tome_core.patch(model, BALANCED) as handle:
        picture, report = run(model), handle.report()
    assert len(report.levels) == 2 and len(report.levels[0].tokens) == 1
    whole = WRAPPERS[wrapper](small())
    plain, before = run(whole), traces(whole)
    with tome_core.patch(whole, BALANCED) as handle:
        assert tome_core.report(whole).patched
        inner = next(one for one in whole.modules() if isinstance(one, diffusers.UNet2DConditionModel))
        for each in (inner, whole):
            handle.reset_counts()
            assert torch.equal(run(each), picture)
            assert handle.report() == report
    assert traces(whole) == before and torch.equal(run(whole), plain)


def test_a_wrapped_ldm_unet_merges_as_the_unet_itself():
    case = BY_NAME["ldm_sd1"]
    reports = []
    for wrapped in (lambda model: model, Wrapper, Trainer):
        model = case.build()
        with tome_core.patch(wrapped(model), BALANCED) as handle:
            call_case(case, model, 1)
            reports.append(handle.report())
    assert reports[0].calls == 1 and reports == [reports[0]] * 3


def test_the_patch_of_a_unet_is_found_and_removed_through_its_wrapper():
    model = small()
    plain = run(model)
    tome_core.patch(model, BALANCED)
    whole = Wrapper(model)
    run(model)
    assert tome_core.report(whole) == tome_core.report(model)
    tome_core.remove_patch(whole)
    assert torch.equal(run(model), plain)


def transformer_of(model: nn.Module) -> nn.Module:
    return next(one for one in model.modules() if hasattr(one, "transformer_blocks"))


def with_its_copy() -> nn.Module:
    model = small()
    return nn.ModuleDict({"online": model, "average": copy.deepcopy(model)})


REFUSED = {
    "a transformer by itself": lambda: transformer_of(small()),
    "an LDM transformer": lambda: transformer_of(ldm_sd1()),
    "a stage by itself": lambda: small().down_blocks[0],
    "stages in a list": lambda: nn.ModuleList([(model := small()).down_blocks[0], model.mid_block]),
    "two UNets": lambda: nn.ModuleList([small(), ldm_sd1()]),
    "a UNet and its copy": with_its_copy,
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_one_unet_is_refused(what: str):
    """Nobody could say which level its blocks are at, or which of them was meant."""
    whole = REFUSED[what]()
    before = traces(whole)
    with pytest.raises(UnsupportedModelError):
        tome_core.patch(whole, BALANCED)
    assert traces(whole) == before
    assert tome_core.remove_patch(whole) is whole and not tome_core.report(whole).patched


def replica(model: nn.Module) -> nn.Module:
    """What `nn.DataParallel` makes of a module for each device, by torch's own means; here with weights of its own."""
    made = {module: module._replicate_for_data_parallel() for module in model.modules()}
    for module, twin in made.items():
        for name, child in module._modules.items():
            setattr(twin, name, made[child])
        for name, weight in module._parameters.items():
            setattr(twin, name, None if weight is None else (weight * 1.1).detach())
        for name, buffer in module._buffers.items():
            setattr(twin, name, buffer)
    return made[model]


def test_a_replica_of_a_patched_unet_calls_its_own_weights():
    """Merged or not; on another device the original's would be an error."""
    model, other = small(), small()
    with torch.no_grad():
        for weight in other.parameters():
            weight.mul_(1.1)
    plain = run(other)
    with tome_core.patch(other, BALANCED):
        merged = run(other)
    assert torch.equal(run(replica(model)), plain)
    with tome_core.patch(model, BALANCED):
        found = run(replica(model))
    assert torch.equal(found, merged) or torch.equal(found, plain)


# --- who holds what --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ended", [True, False], ids=["after the with", "still on"])
def test_a_handle_does_not_keep_a_model_alive(words, ended: bool):
    """A name in a notebook, on a machine whose memory holds one model."""
    pipe = stable_diffusion(words)
    unet = pipe.unet
    if ended:
        with tome_core.patch(pipe, BALANCED) as merging:
            run(unet)
    else:
        merging = tome_core.patch(pipe, BALANCED)
        run(unet)
    known = weakref.ref(unet), weakref.ref(pipe), weakref.ref(unet.conv_in.weight)
    del pipe, unet
    gc.collect()
    assert [one() for one in known] == [None] * 3
    assert merging.report().calls == 1 and merging.report().merged_anything
    merging.remove()


def state(pipe: Any, unet: nn.Module, scheduler: Any) -> list:
    """All that a patch could leave on them."""
    return [type(pipe), sorted(vars(pipe)), traces(unet), type(scheduler), sorted(vars(scheduler))]


@pytest.mark.parametrize("swap", [("unet",), ("scheduler",), ("unet", "scheduler")], ids=" and ".join)
@pytest.mark.parametrize("off", ["remove_patch", "remove"])
def test_a_patch_comes_off_what_it_was_put_on(words, swap: tuple[str, ...], off: str):
    """Also where the pipeline has got others since."""
    pipe, other = stable_diffusion(words), stable_diffusion(words)
    pipe.scheduler = diffusers.EulerDiscreteScheduler.from_config(pipe.scheduler.config)
    unet, scheduler = pipe.unet, pipe.scheduler
    plain, before = run(unet), state(pipe, unet, scheduler)
    handle = tome_core.patch(pipe, LATE)
    for name in swap:
        setattr(pipe, name, getattr(other, name))
    tome_core.remove_patch(pipe) if off == "remove_patch" else handle.remove()
    assert state(pipe, unet, scheduler) == before and not handle.is_installed
    assert torch.equal(run(unet), plain) and traces(pipe.unet) == traces(unet)
