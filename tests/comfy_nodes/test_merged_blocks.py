"""Whole blocks use no slot: their forwards are replaced only while a call of the branch runs."""

import pytest
import torch

from comfy_nodes import host
from comfy_nodes.nodes import ApplyToMe
from tests.comfy_doubles import BaseModel, ModelPatcher, sample
from tests.comfy_models import deep_unet
from tests.models import note_tokens
from tests.traces import traces
from tome_core import MergeConfig, MergeRule
from tome_core.models.unet_blocks import find_blocks

BLOCKS = MergeRule(merge_attn=False, merge_blocks=True, ratio=0.75, side="kv", use_rand=False, min_downsample=2)


def branches():
    """A model as loaded, the same with the node, and the blocks that merge: the second of two in each transformer."""
    plain = ModelPatcher(BaseModel(deep_unet()))
    blocks = [place.block for place in find_blocks(plain.model.diffusion_model) if place.halvings == 1][1::2]
    return plain, ApplyToMe().apply(plain, settings=MergeConfig(rules=(BLOCKS,)))[0], blocks


def test_they_merge_in_the_nodes_branch_alone_and_nothing_stays():
    plain, applied, blocks = branches()
    before, counts = traces(plain.model), []
    hooks = [note_tokens(block.ff.inward, counts) for block in blocks]
    unmerged, merged = sample(plain), sample(applied)
    steps = len(counts) // 2
    assert set(counts[:steps]) == {16} and set(counts[steps:]) == {5}, "four groups and a sample, of 16 tokens"
    assert not torch.equal(unmerged, merged) and torch.equal(sample(plain), unmerged)
    for hook in hooks:
        hook.remove()
    assert traces(plain.model) == before
    report = host.find_attached(applied).latest.report
    assert report.levels[1].tokens == ((16, 5, 5),) and not report.levels[0].tokens
    assert report.levels[1].merged["attn", 16, 5, 5] == report.levels[1].merged["block", 16, 5, 0] == 2 * len(blocks)


def test_an_error_in_a_call_and_another_nodes_forward_leave_the_blocks_as_they_were():
    plain, applied, blocks = branches()
    calls, original = [], blocks[0].forward

    def others(x, *args):
        calls.append(x.shape[1])
        return original(x, *args)

    blocks[0].forward = others
    unmerged = sample(plain)
    calls.clear()
    merged = sample(applied)
    assert set(calls) == {16} and blocks[0].forward is others, "another node's block may need every token"
    assert not torch.equal(merged, unmerged), "blocks of other transformers merge"
    blocks[1].ff.outward.register_forward_hook(lambda *_: torch.zeros(1).view(2))
    with pytest.raises(RuntimeError, match="shape"):
        sample(applied)
    assert blocks[0].forward is others and all("forward" not in vars(block) for block in blocks[1:])


def test_beside_patches_of_attention_all_blocks_stay_whole():
    plain, applied, _ = branches()
    for patcher in (plain, applied):
        patcher.model_options["transformer_options"]["patches"] = {"attn2_patch": [lambda q, k, v, _: (q, k, v)]}
    assert torch.equal(sample(plain), sample(applied))
    report = host.find_attached(applied).latest.report
    assert [why for why in report.levels[1].reasons if why.startswith("block: a patch of attention may need every")]
