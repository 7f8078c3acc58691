"""The nodes on transformers: merged through the slot that attentions ask, for one branch's calls, and nothing left."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from comfy_nodes import host, transformers
from comfy_nodes.nodes import ApplyToMe, RemoveToMe
from comfy_nodes.slot import SLOT, HostCall
from tests.comfy_doubles import apply
from tests.comfy_transformer import Filled, FlowGuider, Flux, Unplaced, transformer
from tome_core import form, strength
from tome_core.engine import state

KV = {"merge_what": "k+v", "ratio": 0.75, "metric": "keys+values", "use_rand": False, "only_if_it_pays": False}
TOKENS = 12 * 16 + 7  # of a latent of 24x32, and of the text
GRID = transformers.grid_of(Flux(), torch.zeros(1, 4, 24, 32))


def sample(patcher, **options) -> torch.Tensor:
    return FlowGuider(patcher).sample(**options)


def report(patcher):
    return host.find_attached(patcher).latest.report


def with_slot(patcher, function):
    patcher.model_options["transformer_options"][SLOT] = function
    return patcher


def test_only_the_branch_with_the_node_merges_and_nothing_is_left():
    plain = transformer()
    before, left = sample(plain), dict(vars(plain.model.diffusion_model))
    merged = apply(plain, **KV)
    found = sample(merged)
    assert 0 < (found - before).norm() < 0.2 * before.norm()
    assert torch.equal(sample(merged), found)
    for branch in (plain, RemoveToMe().remove(merged)[0], ApplyToMe().apply(plain, strength=0)[0]):
        assert torch.equal(sample(branch), before)
    assert vars(plain.model.diffusion_model) == left and SLOT not in plain.model_options["transformer_options"]


def test_joint_attention_merges_text_is_kept_and_the_rest_is_told():
    merged = apply(transformer(), **KV)
    sample(merged, steps=3)
    (level,) = report(merged).levels
    assert level.downsample == 2 and level.tokens == ((TOKENS, TOKENS, 7 + 12 * 16 // 4),)
    assert level.calls_merged == 3 * 2 and level.work_saved > 0.4
    assert not report(merged).reasons and len(host.find_attached(merged).latest.details) <= 10


def test_strength_merges_them_too_where_it_pays(server):
    merged = ApplyToMe().apply(transformer(), strength=0.5, unique_id="5")[0]
    config = form.change(strength(0.5, layout="transformer"), {"start": 0.0, "end": 1.0})
    assert host.find_attached(merged).config == config
    sample(merged)
    assert "so few tokens" in server.texts[-1][1]
    sample(merged, size=(64, 64), steps=2)
    assert report(merged).work_saved > 0.5 and "left out" in server.texts[-1][1]


def test_values_whose_heads_are_apart_already_merge_as_others_do():
    """As SD3 hands them over."""
    q, k, v = (torch.randn(2, 5, 4 * 8) for _ in range(3))
    flat, apart = HostCall(torch.add, q, k, v, 4), HostCall(torch.add, q, k, v.unflatten(2, (4, 8)), 4)
    assert torch.equal(apart.v, flat.v) and flat.v.shape == (2, 5, 4, 8)


def test_where_the_picture_lies_is_known_or_nothing_merges():
    plain = transformer(Unplaced)
    merged = apply(plain, **KV)
    assert torch.equal(sample(merged), sample(plain))
    assert f"7 {transformers.BESIDE}" in " ".join(report(merged).reasons)


def test_a_model_without_tokens_of_known_size_is_refused_with_a_sentence(server):
    patcher = transformer()
    del patcher.model.diffusion_model.patch_size
    merged = ApplyToMe().apply(patcher, unique_id="5")[0]
    assert host.find_attached(merged) is None and "stepped aside" in server.texts[-1][1]


def test_a_hunyuan_video_whose_film_comes_first_is_not_taken_for_one_whose_text_does():
    """As an earlier ComfyUI's was, whose blocks say so."""
    model = Flux()
    model.double_blocks = [SimpleNamespace(flipped_img_txt=True)]
    assert transformers.where_tokens_lie(model, GRID, 192 + 7, {}) == f"7 {transformers.BESIDE}"
    assert transformers.where_tokens_lie(Flux(), GRID, 192 + 7, {}).first == 7


@pytest.mark.parametrize("name", ["HunyuanVideo", "NextDiT", "SingleStreamDiT"])
def test_a_text_that_is_refined_by_itself_is_not_taken_for_a_picture(name):
    """Before the model says in which block it is, be the text longer than the picture or as long."""
    model = type(name, (Flux,), {})()
    for tokens in (192 + 7, 192):
        assert transformers.where_tokens_lie(model, GRID, tokens, {}) == f"{tokens} {transformers.REFINED}"
    assert transformers.where_tokens_lie(model, GRID, 192 + 7, {"block_type": "double"}).first == 7


@pytest.mark.parametrize("multiple, filled", [(None, 192), (32, 192), (50, 200)])
def test_z_images_picture_comes_last_and_is_filled_up(multiple, filled):
    model = type("NextDiT", (Flux,), {"pad_tokens_multiple": multiple})()
    for beside in (7, 7 + 64):  # a text; references too
        assert transformers.where_tokens_lie(model, GRID, beside + filled, {"block_type": "double"}) == (GRID, beside)


def test_what_fills_up_a_picture_is_no_token_of_it():
    plain = transformer(Filled)
    merged = apply(plain, **KV)
    assert 0 < (sample(merged) - sample(plain)).norm() < 0.2 * sample(plain).norm()
    (level,) = report(merged).levels
    assert level.tokens == ((7 + 200, 7 + 200, 7 + 8 + 12 * 16 // 4),)


def test_references_lie_behind_the_picture():
    layout = transformers.where_tokens_lie(Flux(), GRID, 192 + 7 + 50, {"reference_image_num_tokens": [20, 30]})
    assert layout.first == 7


@pytest.mark.parametrize("patch, latent, grid", [
    (2, (1, 16, 63, 64), (32, 32, 1)), ((1, 2, 2), (1, 16, 5, 60, 104), (150, 52, 5)),
    (1, (1, 128, 4, 8, 8), (32, 8, 4)),
])  # fmt: skip
def test_the_grid_is_the_latents_in_whole_tokens(patch, latent, grid):
    model = Flux()
    model.patch_size = patch
    assert tuple(transformers.grid_of(model, torch.zeros(latent))) == grid


def test_attention_in_the_slot_is_called_with_merged_keys_and_what_does_more_keeps_every_call():
    keys, more = [], [1.0]

    def slot(function, q, k, v, heads, **kwargs):
        keys.append(k.shape[1])
        return function(q, k, v, heads, **kwargs) * more[0]

    merged = apply(with_slot(transformer(), slot), **KV)
    assert torch.equal(sample(merged), sample(apply(transformer(), **KV)))
    assert keys.count(7 + 48) == 3 * 2

    def doubled(*args, **kwargs):
        return 2 * slot(*args, **kwargs)

    plain = with_slot(transformer(), doubled)
    assert torch.equal(sample(apply(plain, **KV)), sample(plain))


def test_matches_are_kept_by_block_and_conditions(work):
    sample(apply(transformer(), **KV, keep=400.0, refine=1), steps=4)  # at 1000, 750, 500, 250
    assert work == ["match", "match", "renew", "renew"]


def test_guidance_has_one_match_for_both_conditions(monkeypatch):
    rows, plain = [], state.match
    monkeypatch.setattr(state, "match", lambda k, *args: rows.append(len(k)) or plain(k, *args))
    sample(apply(transformer(), **KV, keep=400.0), steps=1)
    assert rows == [1, 1]  # of two in a batch


def test_start_and_end_are_of_the_flows_own_schedule():
    merged = apply(transformer(), start=0.2, end=0.6, **KV)
    sample(merged, steps=4)  # at 0, .25, .5, .75
    assert report(merged).levels[0].calls_merged == 2 * 2
    assert "outside the rules' time range" in "\n".join(host.find_attached(merged).latest.details)


def test_the_map_is_of_the_picture_alone():
    merged = apply(transformer(), **KV)
    sample(merged)
    ((downsample, found),) = host.find_attached(merged).latest.maps.values()
    assert downsample == 2 and tuple(found.grid[:2]) == (12, 16) and found.group.shape[-1] == 192
