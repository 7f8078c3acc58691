"""Feed-forward layers use no slot: their forwards are replaced only while a call of the branch runs."""

import pytest
import torch

from comfy_nodes import host
from comfy_nodes.nodes import ApplyToMe
from tests.comfy_doubles import BaseModel, ModelPatcher, sample
from tests.comfy_models import unet
from tests.traces import traces
from tome_core import MergeConfig, MergeRule
from tome_core.models.unet_blocks import find_blocks

MLPS = MergeRule(merge_attn=False, merge_mlp=True, ratio=0.75, side="kv", use_rand=False, min_downsample=2)


def branches():
    """A model as loaded, the same with the node, and the feed-forward layers of its coarser level."""
    plain = ModelPatcher(BaseModel(unet()))
    layers = [place.block.ff for place in find_blocks(plain.model.diffusion_model) if place.halvings == 1]
    return plain, ApplyToMe().apply(plain, settings=MergeConfig(rules=(MLPS,)))[0], layers


def test_they_merge_in_the_nodes_branch_alone_and_nothing_stays():
    plain, applied, layers = branches()
    before, counts = traces(plain.model), []
    for layer in layers:
        layer.inward.register_forward_pre_hook(lambda _, args: counts.append(args[0].shape[1]))
    unmerged, merged = sample(plain), sample(applied)
    steps = len(counts) // 2
    assert set(counts[:steps]) == {16} and set(counts[steps:]) == {5}, "four groups and a sample, of 16 tokens"
    assert not torch.equal(unmerged, merged) and torch.equal(sample(plain), unmerged)
    for layer in layers:
        layer.inward._forward_pre_hooks.clear()
    assert traces(plain.model) == before
    report = host.find_attached(applied).latest.report
    assert report.levels[1].mlp_tokens == ((16, 5),) and not report.levels[0].mlp_tokens


def test_an_error_in_a_call_and_another_nodes_forward_leave_the_layers_as_they_were():
    _, applied, layers = branches()
    calls, original = [], layers[0].forward

    def others(x):
        calls.append(x.shape[1])
        return original(x)

    layers[0].forward = others
    sample(applied)
    assert calls and set(calls) == {5} and layers[0].forward is others
    layers[1].outward.register_forward_hook(lambda *_: torch.zeros(1).view(2))
    with pytest.raises(RuntimeError, match="shape"):
        sample(applied)
    assert layers[0].forward is others and all("forward" not in vars(layer) for layer in layers[1:])
