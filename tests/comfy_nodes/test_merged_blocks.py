"""Whole blocks use no slot: their forwards are replaced only while a call of the branch runs."""

import re
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from comfy_nodes.nodes import ApplyToMe
from comfy_nodes.unets import UnetMerging, _options_of
from tests.host_doubles import comfy_attention
from tests.host_doubles.comfy import BaseModel, ModelPatcher, latest, sample
from tests.host_doubles.comfy_models import BasicTransformerBlock, deep_unet, deeper_unet
from tests.small_models.unets import TEXT, note_tokens
from tests.watching.traces import traces
from tome_core import MergeConfig, MergeRule
from tome_core.engine import fewer_tokens
from tome_core.models import every_token
from tome_core.models.unet_blocks import find_blocks

BLOCKS = MergeRule(merge_attn=False, merge_blocks=True, ratio=0.75, side="kv", use_rand=False, min_downsample=2)


def branches(*rules: MergeRule, build: Any = deep_unet):
    """A model as loaded, the same with the node, and the blocks that merge: all but the first of each transformer."""
    plain = ModelPatcher(BaseModel(build()))
    places = [place for place in find_blocks(plain.model.diffusion_model) if place.halvings == 1]
    applied = ApplyToMe().apply(plain, settings=MergeConfig(rules=rules or (BLOCKS,)))[0]
    return plain, applied, [place.block for place in places if not place.path.endswith(".0")]


def told(applied: ModelPatcher) -> tuple[Any, list[str], int]:
    """The report's level of whole blocks, its reasons for blocks, and how often a block merged."""
    level = latest(applied).report.levels[1]
    return level, [why for why in level.reasons if why.startswith("block: ")], level.merged["block", 16, 5, 0]


def with_options(options: dict) -> tuple:
    """Sample with these transformer_options; return what is told, and the latents with and without the node."""
    latents = []
    for patcher in (branched := branches())[1::-1]:
        patcher.model_options["transformer_options"] |= options
        latents.append(sample(patcher))
    return (*told(branched[1]), *latents)


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
    level, _, count = told(applied)
    assert level.tokens == ((16, 5, 5),) and not latest(applied).report.levels[0].tokens
    assert level.merged["attn", 16, 5, 5] == count == 2 * len(blocks)


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


def of_others(attend: Any) -> dict:
    return {"optimized_attention_override": attend}


def passes_on(function, *args, **kwargs):
    return 1.1 * function(*args, **kwargs)


def looks_at_queries(function, q, *args, **kwargs):
    """A region: answers of later tokens are smaller."""
    return function(q, *args, **kwargs) * torch.linspace(1, 0.5, q.shape[1])[:, None]


def looks_at_keys(function, q, k, v, *args, **kwargs):
    return function(q, k, v * torch.linspace(1, 0.5, v.shape[1])[:, None] if k.shape == q.shape else v, *args, **kwargs)


def looks_at_queries_of_texts(function, q, k, *args, **kwargs):
    out = function(q, k, *args, **kwargs)
    return out if k.shape == q.shape else out * torch.linspace(1, 0.5, q.shape[1])[:, None]


def looks_at_queries_alike_at_both_ends(function, q, *args, **kwargs):
    return function(q, *args, **kwargs) * torch.linspace(-1, 1, q.shape[1]).abs()[:, None]


def looks_at_neighbours(function, q, *args, **kwargs):
    """A blur: where the picture begins does not matter to it."""
    return sum(function(q, *args, **kwargs).roll(shift, 1) for shift in (-1, 0, 1))


class Cancelled(Exception):
    """Another node's, or a user's interrupt."""


def failing(error: Exception) -> Any:
    """An attention that raises this in its second call, the first of its trial."""
    calls = []

    def fails(function, *args, **kwargs):
        calls.append(None)
        if len(calls) == 2:
            raise error
        return function(*args, **kwargs)

    return fails


def test_another_nodes_attention_that_treats_tokens_alike_is_tried_and_merges():
    level, whys, _, out, plain = with_options(of_others(passes_on))
    assert level.block_tokens == ((16, 5),) and not whys and not torch.equal(out, plain)


@pytest.mark.parametrize("attend", [looks_at_queries, looks_at_keys, looks_at_queries_of_texts,
                                    looks_at_queries_alike_at_both_ends, looks_at_neighbours])  # fmt: skip
def test_another_nodes_attention_that_looks_at_the_order_of_tokens_gets_all_of_them_and_is_named(attend):
    level, (why,), _, out, plain = with_options(of_others(attend))
    assert "looks at the order of tokens" in why and attend.__name__ in why and not level.block_tokens
    assert torch.equal(out, plain)


def test_another_nodes_attention_that_comes_into_the_call_gets_all_tokens_and_is_named():
    """It is put into the slot over ours, by a wrapper inside ours."""
    plain, applied, _ = branches()

    def bring(executor, x, t, concat, context, control, options):
        return executor(x, t, concat, context, control, {**options, **of_others(looks_at_queries)})

    for patcher in (plain, applied):
        patcher.add_wrapper_with_key("apply_model", "another", bring)
    assert torch.equal(sample(plain), sample(applied))
    assert [why for why in told(applied)[1] if "came into the call" in why and "looks_at_queries" in why]


@pytest.mark.parametrize("error", [Cancelled(), ValueError("tokens in another order")], ids=repr)
def test_in_a_trial_an_interrupt_passes_and_an_attention_that_fails_gets_all_tokens_and_is_named(error):
    _, applied, _ = branches()
    applied.model_options["transformer_options"] |= of_others(failing(error))
    with pytest.raises(Cancelled) if isinstance(error, Cancelled) else nullcontext():
        sample(applied)
        level, whys, _ = told(applied)
        assert not level.block_tokens and [why for why in whys if "looks at the order" in why and "failing" in why]


def test_a_function_is_tried_once_on_texts_and_once_on_the_picture():
    counts = []

    def counted(function, q, k, *args, **kwargs):
        counts.append(len(q))
        return function(q, k, *args, **kwargs)

    level, *_ = with_options(of_others(counted))  # the branch with the node, then the one without
    usual = len(find_blocks(deep_unet())) * 2 * 2  # two attentions a block, two steps
    assert level.block_tokens and counts.count(2) == 2 * usual + 2 * 2


def test_a_function_whose_first_call_has_a_mask_is_not_tried_and_gets_all_tokens():
    def masked(q, k, v, options):
        mask = torch.zeros(q.shape[1], k.shape[1])
        return comfy_attention.optimized_attention(q, k, v, 4, mask=mask, transformer_options=options)

    level, whys, *_ = with_options({"patches_replace": {"attn2": {("input", 1, 0): masked}}, **of_others(passes_on)})
    assert not level.block_tokens and [why for why in whys if "called with a mask, so it was not tried" in why]


def attends(q, k, v, options):
    return F.scaled_dot_product_attention(q, k, v)


def test_a_block_that_runs_before_a_trial_gets_all_tokens():
    before = [_options_of(place.path) for place in find_blocks(deep_unet())
              if place.halvings == 0 or place.path.endswith(".0")]  # fmt: skip
    replaced = {"attn1": {(*block, number): attends for block, number in before}}
    level, (why,), count, *_ = with_options({"patches_replace": replaced, **of_others(passes_on)})
    assert "could not be tried" in why and level.reasons[why] == 1 and count == 2 * len(branches()[2]) - 1


def test_beside_patches_of_attention_all_blocks_stay_whole():
    _, whys, _, out, plain = with_options({"patches": {"attn2_patch": [lambda q, k, v, _: (q, k, v)]}})
    assert torch.equal(out, plain) and [why for why in whys if why.startswith("block: a patch of attention may need")]


@pytest.mark.parametrize("folder", ["", "/home/a.b/custom_nodes/", "C:\\ComfyUI\\custom_nodes\\"])
def test_a_patch_at_one_block_keeps_that_block_whole_and_no_other(folder, monkeypatch):
    """ComfyUI names the modules of a pack by their path. An empty list of patches is nothing."""
    monkeypatch.setattr(attends, "__module__", f"{folder}{__name__}")
    level, (why,), count, *_ = with_options({"patches_replace": {"attn2": {("middle", 0, 1): attends}},
                                             "patches": {"attn1_patch": []}})  # fmt: skip
    assert f"({__name__}.attends)" in why and level.reasons[why] == 2, "of two steps"
    assert count == 2 * (len(branches()[2]) - 1)


def test_a_block_that_gets_its_options_by_name_merges(monkeypatch):
    """As ComfyUI's do."""
    forward = BasicTransformerBlock.forward

    def by_name(self, x, context=None, transformer_options=None):
        return forward(self, x, context, transformer_options)

    def call(self, x, context, options):
        return nn.Module.__call__(self, x, context=context, transformer_options=options)

    by_name.__module__ = forward.__module__
    monkeypatch.setattr(BasicTransformerBlock, "forward", by_name)
    monkeypatch.setattr(BasicTransformerBlock, "__call__", call)
    level, whys, *_ = with_options({})
    assert level.block_tokens == ((16, 5),) and not whys


def test_in_steps_without_a_rule_blocks_are_as_they_were_and_no_reason_is_counted():
    _, applied, blocks = branches(MergeRule(**{**vars(BLOCKS), "max_timestep": 800.0}))
    sample(applied)
    assert told(applied)[1:] == ([], len(blocks)), "in one step of two"


def test_blocks_of_one_transformer_share_a_match(monkeypatch):
    matches, original = [], fewer_tokens.match
    monkeypatch.setattr(fewer_tokens, "match", lambda *args: matches.append(None) or original(*args))
    _, applied, _ = branches(build=deeper_unet)
    sample(applied, steps=1)
    assert told(applied)[2] == 2 * len(matches) > 0


def test_attentions_in_merged_blocks_do_not_count_as_missing():
    _, applied, blocks = branches(MergeRule(**{**vars(BLOCKS), "merge_attn": True}), MergeRule(max_downsample=1))
    sample(applied)
    level, _, count = told(applied)
    assert count == 2 * len(blocks) and not level.reasons


def test_a_forward_that_another_node_kept_during_a_call_is_the_blocks_own_after_it():
    _, applied, blocks = branches()
    kept, block = [], blocks[0]
    block.norm1.forward = lambda x: kept.append(vars(block)["forward"]) or type(block.norm1).forward(block.norm1, x)
    sample(applied)
    del block.norm1.forward
    x, text = torch.randn(2, 16, block.norm1.normalized_shape[0]), torch.randn(2, 7, TEXT)
    options = {"block": ("input", 4), "block_index": 1}
    with torch.no_grad():
        outs = [forward(x, text, dict(options)) for forward in (kept[0], type(block).forward.__get__(block))]
    assert type(outs[0]) is torch.Tensor and torch.equal(*outs)
    assert kept[0].__self__._call is None, "it holds no latent"


def test_sides_of_an_odd_latent_are_halved_and_rounded_up():
    merging = SimpleNamespace(_downsamples=[1, 2, 4])
    latent = torch.zeros(1, 4, 9, 14)
    assert [UnetMerging.sides(merging, latent, level, {}) for level in range(3)] == [[9, 14], [5, 7], [3, 4]]
    assert UnetMerging.sides(merging, latent, 0, {"activations_shape": [1, 32, 3, 5]}) == [3, 5]


def test_the_node_says_what_keeps_whole_blocks_from_merging():
    _, applied, blocks = branches(BLOCKS, MergeRule(ratio=0.5, side="kv", max_downsample=1))
    for block in blocks:
        block.ff.register_forward_hook(lambda *_: None)
    sample(applied)
    _, more = latest(applied).lines
    assert re.match(r"\d+% of the work could not merge: a hook on ff may need every token", more)
    assert more.endswith("it merges without that")


def test_what_runs_below_a_block_is_asked_in_each_call():
    """Object patches replace methods below a block while the model is loaded."""
    plain, applied, blocks = branches()
    for patcher in (plain, applied):
        for block in blocks:
            block.norm3.forward = lambda x, norm=block.norm3: 0.9 * type(norm).forward(norm, x)
        out = sample(patcher)
    assert torch.equal(out, sample(plain)) and [why for why in told(applied)[1] if "at norm3" in why]


def test_blocks_that_get_a_smaller_picture_than_the_latent_merge_that():
    """Deep Shrink halves the picture inside the UNet."""
    _, applied, blocks = branches()
    unet = applied.model.diffusion_model
    for transformer in {place.transformer for place in find_blocks(unet) if place.halvings == 1}:
        transformer.register_forward_pre_hook(lambda _, args: (F.interpolate(args[0], scale_factor=2.0), *args[1:]))
        transformer.register_forward_hook(lambda _, args, out: F.avg_pool2d(out, 2))
    sample(applied)
    level, *_ = told(applied)
    assert level.block_tokens == ((64, 18),) and level.merged["block", 64, 18, 0] == 2 * len(blocks)


def test_modules_below_a_block_are_asked_one_by_one_in_the_first_call_alone(monkeypatch):
    _, applied, blocks = branches()
    asked, original = [], every_token._reasons
    monkeypatch.setattr(every_token, "_reasons", lambda *args: asked.append(args) or original(*args))
    sample(applied, steps=3)
    assert len(asked) == len(blocks)
