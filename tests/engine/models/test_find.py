"""A UNet inside of something is the UNet itself; what is no UNet, or not one, is refused."""

from types import SimpleNamespace
from typing import Any

import diffusers
import pytest
import torch
from torch import nn

import tome_core
from tests.small_models.families import MODELS
from tests.small_models.unets import on_small, sd15, small
from tests.watching.traces import traces
from tome_core import UnsupportedModelError

BALANCED = on_small("balanced")


class Wrapper(nn.Module):
    """A module like DistributedDataParallel: it holds the model as `module` and passes calls on."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


def pipeline(**components: Any) -> SimpleNamespace:
    """An object that holds networks as diffusers' pipelines do."""
    return SimpleNamespace(components=components, **components)


@pytest.mark.parametrize("name, hold", [
    ("sd15", lambda model: Wrapper(nn.DataParallel(model))), ("ldm_sd1", Wrapper), ("ldm_wrapped", lambda it: it.model),
    ("sd15", lambda model: pipeline(unet=model))], ids=["DDP", "DDP, ldm", "LDM", "pipeline"])  # fmt: skip
def test_whatever_holds_a_unet_it_merges_as_by_itself_and_is_found_and_removed_through_either(name: str, hold: Any):
    family = MODELS[name]
    with tome_core.patch(alone := family.build(), BALANCED) as handle:
        picture, report = family.call(alone), handle.report()
    model = family.build()
    plain, before, whole = family.call(model), traces(model), hold(model)
    for handed, other in ((whole, model), (model, whole)):
        handle = tome_core.patch(handed, BALANCED)
        for each in (model, whole) if isinstance(whole, Wrapper) else (model,):
            handle.reset_counts()
            assert torch.equal(family.call(each), picture)
            assert handle.report() == report == tome_core.report(handed) == tome_core.report(other)
        tome_core.remove_patch(other)
        assert not tome_core.report(handed).patched and torch.equal(family.call(model), plain)
    assert traces(model) == before


def transformer_of(model: nn.Module) -> nn.Module:
    return next(module for module in model.modules() if hasattr(module, "transformer_blocks"))


REFUSED = {"a transformer": lambda: transformer_of(small()), "two UNets": lambda: nn.ModuleList([small(), sd15()]),
           "a transformer in a pipeline": lambda: pipeline(transformer=transformer_of(small())),
           "another network": diffusers.AutoencoderKL, "a pipeline of others": lambda: pipeline(prior=nn.Identity()),
           "an empty pipeline": lambda: pipeline(scheduler=object())}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_not_one_unet_is_refused_and_what_is_known_is_named(kind: str):
    """The level of its blocks, or the intended UNet, would be unknown."""
    whole = REFUSED[kind]()
    before = traces(whole) if isinstance(whole, nn.Module) else None
    with pytest.raises(UnsupportedModelError, match="such as Flux, SD3 and Wan"):
        tome_core.patch(whole, BALANCED)
    assert before is None or traces(whole) == before
    assert tome_core.remove_patch(whole) is whole and not tome_core.report(whole).patched


def test_what_is_no_model_is_a_type_error():
    for thing in (None, "runwayml/stable-diffusion-v1-5", object()):
        with pytest.raises(TypeError, match="has to be a UNet, a diffusers pipeline or an LDM model"):
            tome_core.apply_patch(thing)
    assert tome_core.remove_patch(thing) is thing and not tome_core.report(thing).patched
