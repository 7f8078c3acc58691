"""The nodes on transformers: where a picture's tokens lie among others, and what merges of them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from comfy_nodes import transformers
from tests.comfy_doubles import apply, latest, sample, transformer
from tome_core.hosting import Grid

KV = {"merge_what": "k+v", "ratio": 0.75, "metric": "keys+values", "use_rand": False, "only_if_it_pays": False}
SIZE, GRID = (24, 32), Grid(12, 16)  # of a latent, and of its 192 tokens


@pytest.mark.parametrize(("name", "multiple", "beside"), [("Flux", 1, 7), ("NextDiT", 50, 7 + 8)])
def test_joint_attention_merges_the_picture_alone_and_the_rest_is_told(name, multiple, beside):
    plain = transformer(name, pad_tokens_multiple=multiple)
    merged, before = apply(plain, **KV), sample(plain, size=SIZE)
    assert 0 < (sample(merged, size=SIZE) - before).norm() < 0.2 * before.norm()
    report = latest(merged).report
    (level,) = report.levels
    assert level.downsample == 2 and level.tokens == ((192 + beside, 192 + beside, 192 // 4 + beside),)
    assert level.calls_merged == 2 * 2 and level.work_saved > 0.4
    assert not report.reasons and len(latest(merged).details) <= 10
    ((downsample, found),) = latest(merged).maps.values()
    assert downsample == 2 and tuple(found.grid[:2]) == (12, 16) and found.group.shape[-1] == 192


def test_start_and_end_are_of_the_flows_own_schedule():
    merged = apply(transformer(), start=0.2, end=0.6, **KV)
    sample(merged, steps=4)  # at 0, .25, .5, .75
    assert latest(merged).report.levels[0].calls_merged == 2 * 2


def test_a_picture_whose_place_is_not_known_does_not_merge():
    plain = transformer("Unplaced")
    merged = apply(plain, **KV)
    assert torch.equal(sample(merged), sample(plain))
    assert f"7 {transformers.BESIDE}" in " ".join(latest(merged).report.reasons)


FILM_FIRST = {"double_blocks": [SimpleNamespace(flipped_img_txt=True)]}  # an earlier ComfyUI's HunyuanVideo
PLACES = (  # a model, its attributes; the tokens beside the picture's; what the model tells; the picture's first token
    ("Flux", {}, 0, {}, 0), ("Flux", {}, 7, {}, 7), ("Flux", {}, -1, {}, "fewer tokens than the picture has"),
    ("Flux", {}, 7 + 50, {"reference_image_num_tokens": [20, 30]}, 7),
    ("Flux", FILM_FIRST, 7, {}, f"7 {transformers.BESIDE}"), ("Unplaced", {}, 7, {}, f"7 {transformers.BESIDE}"),
    # the picture is last, with what fills it up behind it; a text, or references too, before it
    ("NextDiT", {"pad_tokens_multiple": None}, 7, {}, 7), ("NextDiT", {"pad_tokens_multiple": 32}, 7 + 64, {}, 7 + 64),
    ("NextDiT", {"pad_tokens_multiple": 50}, 7 + 8, {}, 7),
    # before a model says in which block it is it may refine a text, which may be longer than the picture or as long
    *((name, {}, beside, {"block_type": None}, f"{192 + beside} {transformers.REFINED}")
      for name in ("HunyuanVideo", "NextDiT", "SingleStreamDiT") for beside in (0, 7)),
    ("HunyuanVideo", {}, 7, {}, 7), ("SingleStreamDiT", {}, 7, {}, 7),
)  # fmt: skip


@pytest.mark.parametrize(("name", "attributes", "beside", "told", "first"), PLACES)
def test_where_a_pictures_tokens_lie_is_known_by_the_models_name_or_said_to_be_unknown(
    name, attributes, beside, told, first
):
    model = type(name, (), attributes)()
    found = transformers.where_tokens_lie(model, GRID, 192 + beside, {"block_type": "double", **told})
    assert found == first if isinstance(first, str) else found.first == first


PATCHES = (  # a model's attributes, a latent, its grid
    ({"patch_size": 2}, (1, 16, 63, 64), (32, 32, 1)),
    ({"patch_size": (1, 2, 2)}, (1, 16, 5, 60, 104), (150, 52, 5)),
    ({"patch_size": 1}, (1, 128, 4, 8, 8), (32, 8, 4)),
    ({"patch_spatial": 2, "patch_temporal": 1}, (1, 16, 2, 8, 8), (8, 4, 2)),
    ({"patchifier": SimpleNamespace(patch_size=(1, 2, 2))}, (1, 16, 8, 8), (4, 4, 1)),
    ({"patch": 2}, (1, 16, 8, 8), (4, 4, 1)),
    ({"patch_size": True}, (1, 16, 8, 8), None), ({}, (1, 16, 8, 8), None), ({"patch": 2}, (16, 8, 8), None),
)  # fmt: skip


@pytest.mark.parametrize(("names", "latent", "grid"), PATCHES)
def test_the_grid_is_the_latents_in_whole_tokens_whichever_name_the_model_has_for_them(names, latent, grid):
    found = transformers.grid_of(SimpleNamespace(**names), torch.zeros(latent))
    assert found == grid and (grid is None or isinstance(found, Grid))
