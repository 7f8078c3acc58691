"""A UNet inside of something is the UNet itself; what is not one UNet is refused."""

from __future__ import annotations

from types import SimpleNamespace
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


def pipeline(**components: Any) -> SimpleNamespace:
    """As diffusers' pipelines hold their networks."""
    return SimpleNamespace(components=components, **components)


@pytest.mark.parametrize("name", ["sd15", "ldm_sd1"])
def test_a_wrapped_unet_merges_as_the_unet_itself_whichever_is_called(name: str):
    family = MODELS[name]
    with tome_core.patch(model := family.build(), BALANCED) as handle:
        picture, report = family.call(model), handle.report()
    whole = Wrapper(nn.DataParallel(inner := family.build()))
    plain, before = family.call(whole), traces(whole)
    with tome_core.patch(whole, BALANCED) as handle:
        for each in (inner, whole):
            handle.reset_counts()
            assert torch.equal(family.call(each), picture)
            assert handle.report() == report == tome_core.report(whole) == tome_core.report(inner)
    assert traces(whole) == before and torch.equal(family.call(whole), plain)


@pytest.mark.parametrize("name, hold, inner", [
    ("sd15", lambda model: pipeline(unet=model), lambda model: model),
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
        assert "1 model call, " in str(tome_core.report(other))
        tome_core.remove_patch(other)
        assert not tome_core.report(handed).patched and torch.equal(family.call(model), plain)


# --- refusals ---------------------------------------------------------------------------------------------------------


def transformer_of(model: nn.Module) -> nn.Module:
    return next(one for one in model.modules() if hasattr(one, "transformer_blocks"))


def cascade() -> diffusers.StableCascadeDecoderPipeline:
    sizes = {"block_out_channels": (8, 8), "num_attention_heads": (1, 1), "clip_text_pooled_in_channels": 8}
    counts = dict.fromkeys(("down_num_layers_per_block", "up_num_layers_per_block"), (1, 1))
    decoder = StableCascadeUNet(in_channels=4, out_channels=4, conditioning_dim=8, **sizes, **counts)
    return diffusers.StableCascadeDecoderPipeline(decoder, None, None, None, None)


PART = "if it is part of a UNet, patch that"
REFUSED = {
    "a transformer": (lambda: transformer_of(small()), PART),
    "an LDM transformer": (lambda: transformer_of(ldm_sd1()), PART),
    "a stage": (lambda: small().down_blocks[0], PART),
    "two UNets": (lambda: nn.ModuleList([small(), sd15()]), PART),
    "a transformer in a pipeline": (lambda: pipeline(transformer=transformer_of(small())), PART),
    "another network": (lambda: cascade().decoder, "StableCascadeUNet is not known: "),
    "a pipeline of others": (cascade, "StableCascadeDecoderPipeline has neither a UNet nor a transformer, but "),
    "an empty pipeline": (lambda: pipeline(scheduler=object()), "no module at all"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_not_one_unet_is_refused_and_what_is_known_is_named(kind: str):
    """Nobody could say which level its blocks are at, or which of them was meant."""
    build, why = REFUSED[kind]
    whole = build()
    before = traces(whole) if isinstance(whole, nn.Module) else None
    with pytest.raises(UnsupportedModelError, match=why) as caught:
        tome_core.patch(whole, BALANCED)
    assert "tome_core.models.transformer.NAMES, Flux, SD3 and Wan among them" in str(caught.value)
    assert before is None or traces(whole) == before
    assert tome_core.remove_patch(whole) is whole and not tome_core.report(whole).patched
