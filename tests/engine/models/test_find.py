"""A UNet inside of something is the UNet itself; what is not one UNet is refused."""

from __future__ import annotations

from functools import partial
from typing import Any

import diffusers
import pytest
import torch
from diffusers import UNet2DConditionModel
from diffusers.models.unets import StableCascadeUNet
from torch import nn

import tome_core
from tests.models import BY_NAME, call_case, ldm_sd1, on_small, small
from tests.traces import traces
from tome_core import UnsupportedModelError

BALANCED = on_small("balanced")
run = partial(call_case, BY_NAME["sd15"], timestep=100)


class Wrapper(nn.Module):
    """As DistributedDataParallel: the model under the name `module`, and its calls passed on."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


WRAPPERS = {
    "DataParallel": nn.DataParallel,
    "DDP": Wrapper,
    "DDP of a DataParallel": lambda model: Wrapper(nn.DataParallel(model)),
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
        inner = next(one for one in whole.modules() if isinstance(one, UNet2DConditionModel))
        for each in (inner, whole):
            handle.reset_counts()
            assert torch.equal(run(each), picture)
            assert handle.report() == report
    assert traces(whole) == before and torch.equal(run(whole), plain)


def test_a_wrapped_ldm_unet_merges_as_the_unet_itself():
    case = BY_NAME["ldm_sd1"]
    reports = []
    for wrapped in (lambda model: model, Wrapper):
        model = case.build()
        with tome_core.patch(wrapped(model), BALANCED) as handle:
            call_case(case, model, 1)
            reports.append(handle.report())
    assert reports[0].calls == 1 and reports == [reports[0]] * 2


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


REFUSED = {
    "a transformer by itself": lambda: transformer_of(small()),
    "an LDM transformer": lambda: transformer_of(ldm_sd1()),
    "a stage by itself": lambda: small().down_blocks[0],
    "stages in a list": lambda: nn.ModuleList([(model := small()).down_blocks[0], model.mid_block]),
    "two UNets": lambda: nn.ModuleList([small(), ldm_sd1()]),
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


class Pipeline:
    """As diffusers' pipelines hold their networks."""

    def __init__(self, **components: Any) -> None:
        self.components = components
        vars(self).update(components)


def cascade() -> diffusers.StableCascadeDecoderPipeline:
    sizes = {"block_out_channels": (8, 8), "num_attention_heads": (1, 1), "clip_text_pooled_in_channels": 8}
    counts = dict.fromkeys(("down_num_layers_per_block", "up_num_layers_per_block"), (1, 1))
    decoder = StableCascadeUNet(in_channels=4, out_channels=4, conditioning_dim=8, **sizes, **counts)
    return diffusers.StableCascadeDecoderPipeline(decoder, None, None, None, None)


def kandinsky_prior() -> diffusers.KandinskyPriorPipeline:
    prior = diffusers.PriorTransformer(
        num_attention_heads=2, attention_head_dim=8, num_layers=1, embedding_dim=8, num_embeddings=4
    )
    return diffusers.KandinskyPriorPipeline(prior, None, None, None, None, None)


def upsampler() -> Any:
    ltx = pytest.importorskip("diffusers.pipelines.ltx.modeling_latent_upsampler")  # an older diffusers lacks it
    made = ltx.LTXLatentUpsamplerModel(in_channels=4, mid_channels=32, num_blocks_per_stage=1)
    return diffusers.LTXLatentUpsamplePipeline(None, made)


@pytest.mark.parametrize("make, network", [
    (cascade, "StableCascadeUNet"), (kandinsky_prior, "PriorTransformer"), (upsampler, "LTXLatentUpsamplerModel"),
])  # fmt: skip
def test_a_pipeline_of_another_network_is_refused_with_its_name_and_what_is_known(make: Any, network: str):
    pipeline = make()
    inner = next(one for one in pipeline.components.values() if isinstance(one, nn.Module))
    for one, said in ((pipeline, f"{type(pipeline).__name__} has neither a UNet nor a transformer, but {network}. "),
                      (inner, f"{network} is not known: ")):  # fmt: skip
        with pytest.raises(UnsupportedModelError) as caught:
            tome_core.patch(one)
        text = str(caught.value)
        assert text.startswith(said) and "tome_core.models.transformer.NAMES, Flux, SD3 and Wan among them" in text


@pytest.mark.parametrize("pipeline, found", [
    (Pipeline(decoder=nn.Linear(2, 2), scheduler=object()), "neither a UNet nor a transformer, but Linear"),
    (Pipeline(scheduler=object()), "no module at all"),
    (Pipeline(transformer=transformer_of(small())), "if it is a part of a UNet, patch that"),
], ids=["another network", "none", "a transformer with UNets' blocks"])  # fmt: skip
def test_a_pipeline_that_cannot_merge_is_no_wrong_kind_of_argument(pipeline: Pipeline, found: str):
    with pytest.raises(UnsupportedModelError, match=found):
        tome_core.patch(pipeline)
    assert tome_core.remove_patch(pipeline) is pipeline and not tome_core.report(pipeline).patched
