"""What diffusers' transformers need beyond the contract of every model: real classes, tiny, with random weights."""

from typing import Any

import diffusers
import pytest
import torch
from torch import nn

import tome_core
from tests.small_models import dits
from tests.small_models.dits import PRESENT, STRONG, call
from tome_core.engine.state import State
from tome_core.models.transformer import NAMES
from tome_core.reporting.ledger import NO_GRID

# one class for each way to read a call, text's side and time's meaning; the contract draws with every class
_DIFFERENT = ("Flux", "Krea 2", "Qwen-Image, padded", "Z-Image", "Lumina 2", "LTX", "FramePack", "Wan", "CogVideoX",
              "SD3.5", "HunyuanVideo", "Mochi")  # fmt: skip


def test_each_known_class_is_tried_if_diffusers_has_it():
    tried = {dits.MODELS[name].kind for name in PRESENT}
    assert tried == {name for name in NAMES if hasattr(diffusers, name)}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in _DIFFERENT)) for name in PRESENT])
def test_a_place_of_the_latent_is_the_token_at_that_place_of_the_grid(name, monkeypatch):
    """If one place changes, its key changes most in each attention: grid, order and text's side are right."""
    model, arguments = dits.make(name)
    calls = []

    def attend(state, call, name, level, layout, attention):
        calls.append((layout, attention.k))

    monkeypatch.setattr(State, "attend", attend)
    given = "x" if "x" in arguments else "hidden_states"
    latent = arguments[given][0].clone()  # of the first picture
    with tome_core.patch(model, **STRONG):
        call(model, arguments)
        grid, count = calls[0][0].grid, len(calls)
        frame, y, x = grid.frames - 1, 3, 6
        place = (frame * grid.height // grid.frames + y) * grid.width + x
        if latent.dim() == 2:
            latent[place] += 9
        else:
            size = latent.shape[-1] // grid.width
            at = latent[..., size * y : size * (y + 1), size * x : size * (x + 1)]
            frames = [dim for dim in range(at.dim() - 2) if at.shape[dim] == grid.frames]
            (at.select(frames[0], frame) if grid.frames > 1 else at).add_(9)
        whole = [latent] if given == "x" else torch.cat([latent[None], arguments[given][1:]])
        call(model, arguments | {given: whole})
    for (layout, before), (_, after) in zip(calls[:count], calls[count:], strict=True):
        assert int((after - before)[0].flatten(1).norm(dim=1).argmax()) == layout.first + place


def merged_with(model: nn.Module, arguments: dict[str, Any]) -> tuple[torch.Tensor, tome_core.Report]:
    with tome_core.patch(model, **STRONG) as handle:
        return call(model, arguments), handle.report()


def assert_left_alone(model: nn.Module, arguments: dict[str, Any], why: str) -> None:
    picture, report = merged_with(model, arguments)
    assert torch.equal(picture, call(model, arguments)) and set(report.reasons) == {f"attn: {why}"}


def test_padding_that_a_mask_hides_changes_nothing():
    """The merged model sees the text that is left as it sees a shorter text."""
    model, arguments = dits.make("Qwen-Image, padded")
    shorter = arguments | {"encoder_hidden_states": arguments["encoder_hidden_states"][:, :15],
                           "encoder_hidden_states_mask": None}  # fmt: skip
    pictures = [merged_with(model, given)[0] for given in (arguments, shorter)]
    torch.testing.assert_close(*pictures, rtol=1e-4, atol=1e-5)


def test_a_mask_of_pairs_is_read_if_the_tokens_that_it_leaves_see_all_of_each_other():
    """HunyuanVideo 1.5 has such masks. A mask that hides more is left alone, and so is an added mask, as Chroma's."""
    model, arguments = dits.make("Flux")
    rows = torch.arange(dits.WORDS + dits.SIDE**2)[None] >= 5
    pairs = rows[:, None, :, None] & rows[:, None, None, :]

    def masked_by(mask: torch.Tensor) -> dict[str, Any]:
        return arguments | {"joint_attention_kwargs": {"attention_mask": mask}}

    by_rows, _ = merged_with(model, masked_by(rows[:, None, None]))
    by_pairs, report = merged_with(model, masked_by(pairs))
    assert torch.equal(by_pairs, by_rows) and report.calls_merged == 3
    for mask in (pairs.tril(), pairs | pairs.roll(1, 2), rows[:, None, None].float()):
        assert_left_alone(model, masked_by(mask), "an attention mask is on")


def test_grids_that_are_none_and_masks_that_differ_within_a_batch_are_left_alone_and_named():
    model, arguments = dits.make("Flux")
    assert_left_alone(model, arguments | {"img_ids": arguments["img_ids"].flip(0).roll(5, 0)}, NO_GRID)
    model, arguments = dits.make("Qwen-Image")
    twice = {key: torch.cat([it, it]) if torch.is_tensor(it) else it * 2 for key, it in arguments.items()}
    twice["encoder_hidden_states_mask"][1, 10:] = 0
    assert_left_alone(model, twice, "the mask hides different tokens in each picture")
