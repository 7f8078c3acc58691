"""The nodes on transformers: merged through the slot that attentions ask, for one branch's calls, and nothing left."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from comfy_nodes import host, layouts, transformers
from comfy_nodes.branch import Previews
from comfy_nodes.nodes import ApplyToMe, RemoveToMe
from tests import comfy_attention
from tests.comfy_doubles import apply, with_compile
from tests.comfy_transformer import Filled, FlowGuider, Flux, Unplaced, transformer
from tome_core import form, strength
from tome_core.sequence import handle as handles

SLOT = "optimized_attention_override"
KV = {"merge_what": "k+v", "ratio": 0.75, "metric": "keys+values", "use_rand": False, "only_if_it_pays": False}
TOKENS = 12 * 16 + 7  # of a latent of 24x32, and of the text
GRID = layouts.grid_of(Flux(), torch.zeros(1, 4, 24, 32))


def sample(patcher, **options) -> torch.Tensor:
    return FlowGuider(patcher).sample(**options)


def report(patcher):
    return host.find_attached(patcher).report()


def with_slot(patcher, function):
    patcher.model_options["transformer_options"][SLOT] = function
    return patcher


def test_only_the_branch_with_the_node_merges_and_nothing_is_left():
    plain = transformer()
    before, state = sample(plain), dict(vars(plain.model.diffusion_model))
    merged = apply(plain, **KV)
    found = sample(merged)
    assert 0 < (found - before).norm() < 0.2 * before.norm()
    assert torch.equal(sample(merged), found)
    for branch in (plain, RemoveToMe().remove(merged)[0], ApplyToMe().apply(plain, strength=0)[0]):
        assert torch.equal(sample(branch), before)
    assert vars(plain.model.diffusion_model) == state and SLOT not in plain.model_options["transformer_options"]


def test_joint_attention_merges_text_is_kept_and_the_rest_is_told():
    merged = apply(transformer(), **KV)
    sample(merged, steps=3)
    (level,) = report(merged).levels
    assert level.downsample == 2 and level.tokens == ((TOKENS, TOKENS, 7 + 12 * 16 // 4),)
    assert level.calls_merged == 3 * 2 and level.work_saved > 0.4
    assert report(merged).reasons == {"attn: queries and keys are not of the same tokens": 3 * 2}
    assert len(host.find_attached(merged).lines()) <= 10


def test_strength_merges_them_too_where_it_pays(server):
    merged = ApplyToMe().apply(transformer(), strength=0.5, unique_id="5")[0]
    config = form.change(strength(0.5, layout="transformer"), {"start": 0.0, "end": 1.0})
    assert host.find_attached(merged).config == config
    sample(merged)
    assert "so few tokens" in server.texts[-1][1]
    sample(merged, size=(64, 64), steps=2)
    assert report(merged).work_saved > 0.5 and "left out" in server.texts[-1][1]


def test_where_the_picture_lies_is_known_or_nothing_merges():
    plain = transformer(Unplaced)
    merged = apply(plain, **KV)
    assert torch.equal(sample(merged), sample(plain))
    assert f"attn: 7 {layouts.BESIDE}" in report(merged).reasons


def test_a_model_without_tokens_of_known_size_is_refused_with_a_sentence(server):
    patcher = transformer()
    del patcher.model.diffusion_model.patch_size
    merged = ApplyToMe().apply(patcher, unique_id="5")[0]
    assert host.find_attached(merged) is None and "stepped aside" in server.texts[-1][1]


def test_a_hunyuan_video_whose_film_comes_first_is_not_taken_for_one_whose_text_does():
    """As an earlier ComfyUI's was, whose blocks say so."""
    model = Flux()
    model.double_blocks = [SimpleNamespace(flipped_img_txt=True)]
    assert layouts.where_tokens_lie(model, GRID, 192 + 7, {}) == f"7 {layouts.BESIDE}"
    assert layouts.where_tokens_lie(Flux(), GRID, 192 + 7, {}).first == 7


@pytest.mark.parametrize("name", ["HunyuanVideo", "NextDiT", "SingleStreamDiT"])
def test_a_text_that_is_refined_by_itself_is_not_taken_for_a_picture(name):
    """Before the model says in which block it is, be the text longer than the picture or as long."""
    model = type(name, (Flux,), {})()
    for tokens in (192 + 7, 192):
        assert layouts.where_tokens_lie(model, GRID, tokens, {}) == f"{tokens} {layouts.REFINED}"
    assert layouts.where_tokens_lie(model, GRID, 192 + 7, {"block_type": "double"}).first == 7


@pytest.mark.parametrize("multiple, filled", [(None, 192), (32, 192), (50, 200)])
def test_z_images_picture_comes_last_and_is_filled_up(multiple, filled):
    model = type("NextDiT", (Flux,), {"pad_tokens_multiple": multiple})()
    for beside in (7, 7 + 64):  # a text; references too
        assert layouts.where_tokens_lie(model, GRID, beside + filled, {"block_type": "double"}) == (GRID, beside)


def test_what_fills_up_a_picture_is_no_token_of_it():
    plain = transformer(Filled)
    merged = apply(plain, **KV)
    assert 0 < (sample(merged) - sample(plain)).norm() < 0.2 * sample(plain).norm()
    (level,) = report(merged).levels
    assert level.tokens == ((7 + 200, 7 + 200, 7 + 8 + 12 * 16 // 4),)


def test_references_lie_behind_the_picture():
    layout = layouts.where_tokens_lie(Flux(), GRID, 192 + 7 + 50, {"reference_image_num_tokens": [20, 30]})
    assert layout.first == 7


@pytest.mark.parametrize("patch, latent, grid", [
    (2, (1, 16, 63, 64), (32, 32, 1)), ((1, 2, 2), (1, 16, 5, 60, 104), (150, 52, 5)),
    (1, (1, 128, 4, 8, 8), (32, 8, 4)),
])  # fmt: skip
def test_the_grid_is_the_latents_in_whole_tokens(patch, latent, grid):
    model = Flux()
    model.patch_size = patch
    assert tuple(layouts.grid_of(model, torch.zeros(latent))) == grid


class Noted:
    """In the slot: attention that adds a mask, drops it, refuses it, or does more; notes what keys came by."""

    def __init__(self, drops: bool = False, more: float = 1.0, refuses: bool = False) -> None:
        self.drops, self.more, self.refuses, self.keys = drops, more, refuses, []

    def __call__(self, function, q, k, v, heads, mask=None, **kwargs):
        self.keys.append(k.shape[1])
        if self.refuses and mask is not None:
            raise RuntimeError("Flash attention does not support attention masks")
        return function(q, k, v, heads, mask=None if self.drops else mask, **kwargs) * self.more


def test_attention_in_the_slot_that_adds_masks_is_called_with_merged_keys():
    slot = Noted()
    merged = apply(with_slot(transformer(), slot), **KV)
    assert torch.equal(sample(merged), sample(apply(transformer(), **KV)))
    assert slot.keys.count(7 + 48) == 3 * 2 and slot.keys.count(64) == 2  # tried twice


@pytest.mark.parametrize("what", ["drops", "refuses"])
def test_attention_in_the_slot_that_adds_no_masks_gives_way_where_keys_merge(what):
    """As SageAttention's does by a node, and FlashAttention's."""
    slot = Noted(**{what: True})
    merged = apply(with_slot(transformer(), slot), **KV)
    torch.testing.assert_close(sample(merged), sample(apply(transformer(), **KV)))
    assert 7 + 48 not in slot.keys and slot.keys.count(7) == 3 * 2


def test_what_does_more_than_attention_in_the_slot_keeps_every_call():
    plain = with_slot(transformer(), Noted(more=1.5))
    merged = apply(plain, **KV)
    assert torch.equal(sample(merged), sample(plain))
    assert f"attn: {transformers._NOT_PLAIN}" in report(merged).reasons


def test_comfyuis_own_choice_of_a_function_counts():
    """One that knows no masks gives way; one that adds them does not."""
    for function, way in ((comfy_attention.attention_flash, "bias, by torch's own function"),
                          (comfy_attention.attention_basic, "bias")):  # fmt: skip
        merged = apply(with_slot(transformer(), comfy_attention.chosen(function)), **KV)
        sample(merged)
        assert set(report(merged).routes) == {way}


class Compiled(nn.Module):
    """As torch.compile's, which runs later what it was compiled from; notes whether our function came by."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self._orig_mod, self.ours = inner, []

    def forward(self, x, t, context, transformer_options):
        self.ours.append(SLOT in transformer_options)
        return self._orig_mod(x, t, context, transformer_options)


def test_a_compiled_transformer_gets_nothing_of_ours_in_any_order():
    """What ComfyUI compiled with our function in the options fails in every branch that has none."""
    plain = transformer()
    compiled, before = Compiled(plain.model.diffusion_model), sample(plain)
    for merged in (with_compile(apply(plain, **KV), compiled), apply(with_compile(plain, compiled), **KV)):
        assert torch.equal(sample(merged), before) and compiled.ours and not any(compiled.ours)
        assert host.find_attached(merged).lines() == ["ToMe: stepped aside: the model is compiled"]
    model = plain.model.diffusion_model
    assert not transformers.is_compiled(model, {})
    model.blocks[1] = Compiled(model.blocks[1])  # as packs do that compile by block
    assert transformers.is_compiled(model, {})


def test_matches_are_kept_by_block_and_conditions(monkeypatch):
    done, plain = [], handles.match
    monkeypatch.setattr(handles, "match", lambda *args: done.append(args[-1] is not None) or plain(*args))
    merged = apply(transformer(), **KV, keep=400.0, refine=1)
    sample(merged, steps=4)  # at 1000, 750, 500, 250
    assert done == [False, False, True, True]
    (handle,) = host.find_attached(merged)._called
    assert not handle.run.sampling.goes_on  # and nothing is held


def test_guidance_has_one_match_for_both_conditions(monkeypatch):
    rows, plain = [], handles.match
    monkeypatch.setattr(handles, "match", lambda k, *args: rows.append(len(k)) or plain(k, *args))
    sample(apply(transformer(), **KV, keep=400.0), steps=1)
    assert rows == [1, 1]  # of two in a batch


def test_start_and_end_are_of_the_flows_own_schedule():
    merged = apply(transformer(), start=0.2, end=0.6, **KV)
    sample(merged, steps=4)  # at 0, .25, .5, .75
    assert report(merged).levels[0].calls_merged == 2 * 2
    assert "between start and end at 2 of 4 noise levels" in "\n".join(host.find_attached(merged).lines())


def test_a_preview_asks_for_a_map_of_the_picture():
    merged = apply(transformer(), **KV)
    merging = host.find_attached(merged)
    merging._ask = lambda: Previews(maps=True, gain=True)
    sample(merged)
    ((downsample, found),) = merging.maps().values()
    assert downsample == 2 and tuple(found.grid[:2]) == (12, 16) and found.group.shape[-1] == 192
