"""What diffusers' transformers need beyond the contract of every model: real classes, tiny, with random weights."""

from __future__ import annotations

import diffusers
import pytest
import torch

import tome_core
from tests import tiny_transformers, transformer_pipelines
from tests.tiny_transformers import PRESENT, STRONG, call, distance
from tests.transformer_pipelines import draw
from tome_core.engine.state import State
from tome_core.models.transformer import NAMES
from tome_core.reporting.ledger import NO_GRID

families = pytest.mark.parametrize("name", PRESENT)


def test_each_known_class_is_tried_where_diffusers_has_it():
    tried = {tiny_transformers.MODELS[name][0] for name in PRESENT}
    assert tried == {name for name in NAMES if hasattr(diffusers, name)}


@families
def test_every_attention_over_the_picture_merges_near_to_the_unmerged_model(name):
    model, arguments = tiny_transformers.make(name)
    plain = call(model, arguments)
    with tome_core.patch(model, **STRONG) as handle:
        merged = call(model, arguments)
        (level,) = handle.report().levels
    assert not torch.equal(merged, plain) and distance(merged, plain) < 0.05
    with tome_core.patch(model, **STRONG, correction=False):
        assert distance(call(model, arguments), plain) > distance(merged, plain), "the correction brings it nearer"
    assert level.calls_merged == level.blocks and not level.reasons
    share = tiny_transformers.MODELS[name].count / level.tokens[0][0]  # of the picture's tokens
    assert "left out" in str(handle.report()) and level.work_saved > 0.85 * share


@families
def test_a_place_of_the_latent_is_the_token_at_that_place_of_the_grid(name, monkeypatch):
    """One place is changed, and in each attention its key most of all: grid, order and text's side are true."""
    model, arguments = tiny_transformers.make(name)
    asked = []

    def attend(state, call, name, level, layout, attention):
        asked.append((layout, attention.k))

    monkeypatch.setattr(State, "attend", attend)
    given = "x" if "x" in arguments else "hidden_states"
    latent = arguments[given][0].clone()  # of the first picture
    with tome_core.patch(model, **STRONG):
        call(model, arguments)
        grid, count = asked[0][0].grid, len(asked)
        frame, y, x = grid.frames - 1, 3, 6
        place = (frame * grid.height // grid.frames + y) * grid.width + x
        if latent.dim() == 2:
            latent[place] += 9
        else:
            size = latent.shape[-1] // grid.width
            at = latent[..., size * y : size * (y + 1), size * x : size * (x + 1)]
            frames = [one for one in range(at.dim() - 2) if at.shape[one] == grid.frames]
            (at.select(frames[0], frame) if grid.frames > 1 else at).add_(9)
        whole = [latent] if given == "x" else torch.cat([latent[None], arguments[given][1:]])
        call(model, arguments | {given: whole})
    for (layout, before), (_, after) in zip(asked[:count], asked[count:], strict=True):
        assert int((after - before)[0].flatten(1).norm(dim=1).argmax()) == layout.first + place


def test_padding_that_a_mask_hides_changes_nothing():
    """Of the text that is left, the merged model sees what it sees of a shorter text."""
    model, arguments = tiny_transformers.make("Qwen-Image, padded")
    shorter = arguments | {"encoder_hidden_states": arguments["encoder_hidden_states"][:, :15],
                           "encoder_hidden_states_mask": None}  # fmt: skip
    with tome_core.patch(model, **STRONG):
        torch.testing.assert_close(call(model, arguments), call(model, shorter), rtol=1e-4, atol=1e-5)


def test_masks_that_differ_within_a_batch_are_left_alone_and_told():
    model, arguments = tiny_transformers.make("Qwen-Image")
    twice = {key: torch.cat([one, one]) if torch.is_tensor(one) else one * 2 for key, one in arguments.items()}
    twice["encoder_hidden_states_mask"][1, 10:] = 0
    plain = call(model, twice)
    with tome_core.patch(model, **STRONG) as handle:
        assert torch.equal(call(model, twice), plain)
    assert "a mask hides other tokens in each picture" in str(handle.report())


def test_a_mask_of_pairs_is_read_where_those_that_it_leaves_see_all_of_each_other():
    """As HunyuanVideo 1.5's. One that hides more is left alone."""
    model, arguments = tiny_transformers.make("Flux")
    tokens = tiny_transformers.WORDS + tiny_transformers.SIDE**2
    rows = torch.arange(tokens)[None] >= 5
    pairs = rows[:, None, :, None] & rows[:, None, None, :]

    def merged_with(mask: torch.Tensor) -> tuple[torch.Tensor, tome_core.Report]:
        with tome_core.patch(model, **STRONG) as handle:
            return call(model, arguments | {"joint_attention_kwargs": {"attention_mask": mask}}), handle.report()

    by_rows, _ = merged_with(rows[:, None, None])
    by_pairs, report = merged_with(pairs)
    assert torch.equal(by_pairs, by_rows) and report.calls_merged == 3
    for mask in (pairs.tril(), pairs | pairs.roll(1, 2)):
        plain = call(model, arguments | {"joint_attention_kwargs": {"attention_mask": mask}})
        merged, report = merged_with(mask)
        assert torch.equal(merged, plain) and report.reasons == {"attn: an attention mask came along": 3}


def test_a_mask_that_is_added_is_left_alone_and_told():
    """As Chroma's pipeline gives one: ones for what is seen, zeros for padding, in numbers."""
    model, arguments = tiny_transformers.make("Chroma")
    seen = torch.arange(tiny_transformers.WORDS + tiny_transformers.SIDE**2)[None] >= 5
    given = arguments | {"attention_mask": seen.float()}
    plain = call(model, given)
    with tome_core.patch(model, **STRONG) as handle:
        assert torch.equal(call(model, given), plain)
    assert handle.report().reasons == {"attn: an attention mask came along": 2}


def test_grids_that_are_none_are_left_alone_and_told():
    model, arguments = tiny_transformers.make("Flux")
    arguments["img_ids"] = arguments["img_ids"].flip(0).roll(5, 0)
    plain = call(model, arguments)
    with tome_core.patch(model, **STRONG) as handle:
        assert torch.equal(call(model, arguments), plain)
    assert NO_GRID in str(handle.report())


def test_kept_matches_save_matches(work):
    def matches_of(keep: float) -> int:
        work.clear()
        pipe, words = transformer_pipelines.make("Flux")
        with tome_core.patch(pipe, **STRONG, keep=keep) as handle:
            draw(pipe, words, num_inference_steps=4)
        assert handle.report().calls == 4
        return len(work)

    assert 0 < matches_of(400.0) < matches_of(0.0)
