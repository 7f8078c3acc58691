"""The nodes on transformers: where a picture's tokens lie among others, and what merges of them."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from comfy_nodes import transformers
from tests.comfy_doubles import FlowGuider, apply, latest, transformer
from tests.comfy_models import Flux, NextDiT, Unplaced
from tome_core.hosting import Grid

KV = {"merge_what": "k+v", "ratio": 0.75, "metric": "keys+values", "use_rand": False, "only_if_it_pays": False}
TOKENS = 12 * 16 + 7  # of a latent of 24x32, and of the text
GRID = transformers.grid_of(Flux(), torch.zeros(1, 4, 24, 32))


def sample(patcher, **options) -> torch.Tensor:
    return FlowGuider(patcher).sample(**options)


def first_of(model, beside, told=None) -> int | str:
    """Where the first token of the picture lies; or why that is not known. beside: so many other tokens."""
    found = transformers.where_tokens_lie(model, GRID, 192 + beside, {"block_type": "double", **(told or {})})
    return found if isinstance(found, str) else found.first


def test_joint_attention_merges_the_picture_alone_and_the_rest_is_told():
    plain = transformer()
    merged, before = apply(plain, **KV), sample(plain)
    assert 0 < (sample(merged) - before).norm() < 0.2 * before.norm()
    report = latest(merged).report
    (level,) = report.levels
    assert level.downsample == 2 and level.tokens == ((TOKENS, TOKENS, 7 + 12 * 16 // 4),)
    assert level.calls_merged == 3 * 2 and level.work_saved > 0.4
    assert not report.reasons and len(latest(merged).details) <= 10
    ((downsample, found),) = latest(merged).maps.values()
    assert downsample == 2 and tuple(found.grid[:2]) == (12, 16) and found.group.shape[-1] == 192


def test_start_and_end_are_of_the_flows_own_schedule():
    merged = apply(transformer(), start=0.2, end=0.6, **KV)
    sample(merged, steps=4)  # at 0, .25, .5, .75
    assert latest(merged).report.levels[0].calls_merged == 2 * 2


# --- where tokens lie ------------------------------------------------------------------------------------------------


def test_a_picture_whose_place_is_not_known_does_not_merge():
    plain = transformer(Unplaced)
    merged = apply(plain, **KV)
    assert torch.equal(sample(merged), sample(plain))
    assert f"7 {transformers.BESIDE}" in " ".join(latest(merged).report.reasons)


def test_text_comes_first_and_references_behind_the_picture():
    model = Flux()
    assert first_of(model, 0) == 0 and first_of(model, 7) == 7 and isinstance(first_of(model, -1), str)
    assert first_of(model, 7 + 50, {"reference_image_num_tokens": [20, 30]}) == 7
    # the film of an earlier ComfyUI's HunyuanVideo is first
    model.double_blocks = [SimpleNamespace(flipped_img_txt=True)]
    assert first_of(model, 7) == f"7 {transformers.BESIDE}"


def test_a_text_that_is_refined_by_itself_is_not_taken_for_a_picture():
    """Before the model says in which block it is, be the text longer than the picture or as long."""
    for name in ("HunyuanVideo", "NextDiT", "SingleStreamDiT"):
        model = type(name, (Flux,), {})()
        for tokens in (192 + 7, 192):
            assert transformers.where_tokens_lie(model, GRID, tokens, {}) == f"{tokens} {transformers.REFINED}"
        assert first_of(model, 7) == 7


def test_z_images_picture_comes_last_and_what_fills_it_up_is_no_token_of_it():
    for multiple, filled in ((None, 0), (32, 0), (50, 8)):
        model = type("NextDiT", (Flux,), {"pad_tokens_multiple": multiple})()
        assert [first_of(model, beside + filled) for beside in (7, 7 + 64)] == [7, 7 + 64], "a text; references too"
    merged = apply(transformer(NextDiT), **KV)
    sample(merged)
    assert latest(merged).report.levels[0].tokens == ((7 + 200, 7 + 200, 7 + 8 + 12 * 16 // 4),)


PATCHES = (  # a model's attributes, a latent, its grid
    ({"patch_size": 2}, (1, 16, 63, 64), (32, 32, 1)),
    ({"patch_size": (1, 2, 2)}, (1, 16, 5, 60, 104), (150, 52, 5)),
    ({"patch_size": 1}, (1, 128, 4, 8, 8), (32, 8, 4)),
    ({"patch_spatial": 2, "patch_temporal": 1}, (1, 16, 2, 8, 8), (8, 4, 2)),
    ({"patchifier": SimpleNamespace(patch_size=(1, 2, 2))}, (1, 16, 8, 8), (4, 4, 1)),
    ({"patch": 2}, (1, 16, 8, 8), (4, 4, 1)),
    ({"patch_size": True}, (1, 16, 8, 8), None), ({}, (1, 16, 8, 8), None), ({"patch": 2}, (16, 8, 8), None),
)  # fmt: skip


def test_the_grid_is_the_latents_in_whole_tokens_whichever_name_the_model_has_for_them():
    for names, latent, grid in PATCHES:
        found = transformers.grid_of(SimpleNamespace(**names), torch.zeros(latent))
        assert found == grid and (grid is None or isinstance(found, Grid)), names
