"""A UNet inside of something is the UNet itself; what is not one UNet is refused."""

from __future__ import annotations

from functools import partial
from typing import Any

import diffusers
import pytest
import torch
from diffusers.models.unets import StableCascadeUNet
from torch import nn

import tome_core
from tests.families import MODELS
from tests.models import ldm_sd1, on_small, sd15, small
from tests.traces import traces
from tome_core import UnsupportedModelError

BALANCED = on_small("balanced")


class Wrapper(nn.Module):
    """As DistributedDataParallel: the model under the name `module`, and its calls passed on."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


@pytest.mark.parametrize("wrapper", [nn.DataParallel, Wrapper, lambda model: Wrapper(nn.DataParallel(model))],
                         ids=["DataParallel", "DDP", "both"])  # fmt: skip
@pytest.mark.parametrize("name", ["sd15", "ldm_sd1"])
def test_a_wrapped_unet_merges_as_the_unet_itself_whichever_is_called(name: str, wrapper: Any):
    family = MODELS[name]
    with tome_core.patch(model := family.build(), BALANCED) as handle:
        picture, report = family.call(model), handle.report()
    whole = wrapper(inner := family.build())
    plain, before = family.call(whole), traces(whole)
    with tome_core.patch(whole, BALANCED) as handle:
        for each in (inner, whole):
            handle.reset_counts()
            assert torch.equal(family.call(each), picture)
            assert handle.report() == report == tome_core.report(whole) == tome_core.report(inner)
    assert traces(whole) == before and torch.equal(family.call(whole), plain)


class Pipeline:
    """As diffusers' pipelines hold their networks."""

    def __init__(self, **components: Any) -> None:
        self.components = components
        vars(self).update(components)


@pytest.mark.parametrize("name, hold, inner", [
    ("sd15", lambda model: Pipeline(unet=model), lambda model: model),
    ("ldm_wrapped", lambda model: model.model, lambda model: model.model.diffusion_model),
    ("sd15", Wrapper, lambda model: model),
], ids=["pipeline", "LDM", "DDP"])  # fmt: skip
def test_a_patch_is_found_and_removed_through_whatever_holds_the_model(name: str, hold: Any, inner: Any):
    family = MODELS[name]
    model = family.build()
    plain = family.call(model)
    for handed, other in ((model, hold(model)), (hold(model), inner(model))):
        assert tome_core.apply_patch(handed, ratio=0.9) is handed
        family.call(model)
        assert tome_core.report(handed) == tome_core.report(other) == tome_core.report(inner(model))
        text = str(tome_core.report(other))
        assert "settings: ratio=0.9, " in text and "over the cap 0.75" in text and "1 model call, " in text
        tome_core.remove_patch(other)
        assert not tome_core.report(handed).patched and torch.equal(family.call(model), plain)


# --- refusals ---------------------------------------------------------------------------------------------------------


def transformer_of(model: nn.Module) -> nn.Module:
    return next(one for one in model.modules() if hasattr(one, "transformer_blocks"))


@pytest.mark.parametrize("build", [
    lambda: transformer_of(small()), lambda: transformer_of(ldm_sd1()), lambda: small().down_blocks[0],
    lambda: nn.ModuleList([(model := small()).down_blocks[0], model.mid_block]),
    lambda: nn.ModuleList([small(), sd15()]),
], ids=["a transformer", "an LDM transformer", "a stage", "stages in a list", "two UNets"])  # fmt: skip
def test_what_is_not_one_unet_is_refused(build: Any):
    """Nobody could say which level its blocks are at, or which of them was meant."""
    whole = build()
    before = traces(whole)
    with pytest.raises(UnsupportedModelError):
        tome_core.patch(whole, BALANCED)
    assert traces(whole) == before
    assert tome_core.remove_patch(whole) is whole and not tome_core.report(whole).patched


def cascade() -> diffusers.StableCascadeDecoderPipeline:
    sizes = {"block_out_channels": (8, 8), "num_attention_heads": (1, 1), "clip_text_pooled_in_channels": 8}
    counts = dict.fromkeys(("down_num_layers_per_block", "up_num_layers_per_block"), (1, 1))
    decoder = StableCascadeUNet(in_channels=4, out_channels=4, conditioning_dim=8, **sizes, **counts)
    return diffusers.StableCascadeDecoderPipeline(decoder, None, None, None, None)


def test_another_network_is_refused_with_its_name_and_what_is_known():
    pipeline = cascade()
    for model, start in ((pipeline, f"{type(pipeline).__name__} has neither a UNet nor a transformer, but "),
                         (pipeline.decoder, "StableCascadeUNet is not known: ")):  # fmt: skip
        with pytest.raises(UnsupportedModelError) as caught:
            tome_core.patch(model)
        text = str(caught.value)
        assert text.startswith(start) and "StableCascadeUNet" in text
        assert "tome_core.models.transformer.NAMES, Flux, SD3 and Wan among them" in text


@pytest.mark.parametrize("pipeline, found", [
    (partial(Pipeline, decoder=nn.Linear(2, 2), scheduler=object()), "neither a UNet nor a transformer, but Linear"),
    (partial(Pipeline, scheduler=object()), "no module at all"),
    (lambda: Pipeline(transformer=transformer_of(small())), "if it is a part of a UNet, patch that"),
], ids=["another network", "none", "a transformer with UNets' blocks"])  # fmt: skip
def test_a_pipeline_that_cannot_merge_is_no_wrong_kind_of_argument(pipeline: Any, found: str):
    with pytest.raises(UnsupportedModelError, match=found):
        tome_core.patch(pipe := pipeline())
    assert tome_core.remove_patch(pipe) is pipe and not tome_core.report(pipe).patched
