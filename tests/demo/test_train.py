"""Training the embedded model: a stop costs nothing, level-0 heads become sharp, and gates judge the result."""

from __future__ import annotations

import pytest
import torch

from demo import attention, model, train, training_loss
from demo.train import TrainingState
from demo.training_loss import Scenes
from tests import tiny_scenes

pytestmark = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="training takes torch 2.9's Muon")
TINY = {"sd": tiny_scenes.UNET, "flux": tiny_scenes.FLUX}


def fresh(layout="sd", seed=0):
    torch.manual_seed(seed)
    return TrainingState(model.make(TINY[layout]), 1e-3)


def advance(state, steps):
    scenes = Scenes(0, 2, 32, crop=16)
    return [train.train_step(state, scenes[state.step], seed=0) for _ in range(steps)]


# --- a run ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", TINY)
def test_a_resumed_run_goes_on_as_if_it_had_never_stopped(tmp_path, layout):
    state = fresh(layout)
    advance(state, 2)
    state.seconds = 12.5
    state.save(tmp_path / "state.safetensors")
    resumed = fresh(layout, 99)
    resumed.load(tmp_path / "state.safetensors")
    assert (resumed.step, resumed.seconds) == (2, 12.5)
    assert advance(resumed, 2) == advance(state, 2)
    for module in ("model", "average"):
        theirs, start = getattr(state, module).state_dict(), getattr(fresh(layout), module).state_dict()
        for name, value in getattr(resumed, module).state_dict().items():
            assert torch.equal(value, theirs[name]) and not torch.equal(value, start[name]), name


@pytest.mark.slow
def test_a_whole_run_of_sdxls_layout_ends_with_weights_and_what_they_are_worth(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(model.LAYOUTS, "sdxl", tiny_scenes.UNET_XL)
    start, output = tmp_path / "start.safetensors", tmp_path / "weights.safetensors"
    model.save(tiny_scenes.make(), start)
    assert train.main(["--layout", "sdxl", "--minutes", "0.02", "--batch", "2", "--start", str(start),
                       "--state", str(tmp_path / "state.safetensors"), "--output", str(output)]) == 0
    assert model.load(output).pooled is not None
    said = capsys.readouterr().out
    assert "held-out loss" in said and "level-0 heads" in said and "begin as in the given weights" in said


@pytest.mark.parametrize("kept", [True, False])
def test_a_new_run_goes_on_with_the_heads_of_a_model_or_draws_half_of_them_anew(tmp_path, monkeypatch, kept):
    monkeypatch.setitem(model.LAYOUTS, "sd", tiny_scenes.UNET)
    model.save(fresh(seed=7).model, tmp_path / "start.safetensors")
    options = train.parser().parse_args(["--minutes", "1", "--start", str(tmp_path / "start.safetensors"), "--state",
                                         str(tmp_path / "state.safetensors"), *["--keep-heads"] * kept])
    begun, given = train.prepare(options).model, model.load(tmp_path / "start.safetensors")
    assert torch.equal(begun.unet.conv_in.weight, given.unet.conv_in.weight)
    heads = zip(attention.level_0(begun), attention.level_0(given), strict=True)
    assert [torch.equal(a.to_q.weight, b.to_q.weight) for a, b in heads] == [kept] * 3


def test_a_step_that_goes_wrong_leaves_the_weights_and_what_was_saved(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(model.LAYOUTS, "sd", tiny_scenes.UNET)
    path, state = tmp_path / "state.safetensors", fresh()
    with torch.no_grad():
        state.model.emb.weight.fill_(torch.inf)
    before = {name: value.clone() for name, value in state.model.state_dict().items()}
    state.save(path)
    saved = path.read_bytes()
    assert train.main(["--minutes", "1", "--batch", "2", "--state", str(path)]) == 1
    assert "step 0 has loss nan" in capsys.readouterr().err and path.read_bytes() == saved
    with pytest.raises(FloatingPointError):
        advance(state, 1)
    assert all(torch.equal(value, before[name]) for name, value in state.model.state_dict().items())


def test_a_file_that_is_no_training_state_and_wrong_options_are_refused(tmp_path, capsys):
    path = tmp_path / "state.safetensors"
    path.write_bytes(b"nothing")
    assert train.main(["--minutes", "1", "--state", str(path)]) == 2
    assert "is no training state" in capsys.readouterr().err and path.read_bytes() == b"nothing"
    for option in ("--coarse=1", "--keep-heads"):
        assert train.main(["--minutes", "1", "--state", str(tmp_path / "other"), option]) == 2
        assert option.replace("=", " ") in capsys.readouterr().err


# --- level-0 heads ----------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_a_head_that_averages_uses_all_keys_and_a_head_that_looks_up_uses_few():
    tiny = tiny_scenes.make()
    for factor, keys in ((1000, 0.0), (0, 1.0)):
        for module in attention.level_0(tiny):
            module.to_q.weight.mul_(factor)
        assert attention.effective_keys(tiny, 1) == pytest.approx([keys] * 6, abs=0.01)


@torch.no_grad()
def test_measuring_leaves_the_model_and_attention_that_gives_nothing_is_worth_nothing():
    tiny = tiny_scenes.make()
    before = training_loss.held_out_loss(tiny, 1)
    assert attention.loss_rise(tiny, 1) != 0 and training_loss.held_out_loss(tiny, 1) == before
    for module in attention.level_0(tiny):
        module.to_out[0].weight.zero_()
        module.to_out[0].bias.zero_()
    assert attention.loss_rise(tiny, 1) == 0


def test_training_makes_broad_heads_sharper_if_there_is_something_to_see():
    broad, sharp = torch.zeros(2, 1, requires_grad=True), torch.full((2, 1), -5.0, requires_grad=True)
    attention.broadness([broad, sharp], torch.tensor([100, 900])).backward()
    assert (broad.grad > 0).flatten().tolist() == [True, False] and not sharp.grad.any()


@pytest.mark.slow
@pytest.mark.parametrize("path", model.CHECKPOINTS, ids=lambda path: path.stem)
def test_the_shipped_models_pass_their_gates_and_a_gate_that_is_missed_is_told(path):
    """On fewer pictures than training takes."""
    scene_model = model.load(path)
    measured = attention.Gates(attention.effective_keys(scene_model, 1), attention.loss_rise(scene_model, 4))
    assert "MISSED" not in str(measured)
    assert str(attention.Gates((0.21, 0.9), 0.29)).count("MISSED") == 2
