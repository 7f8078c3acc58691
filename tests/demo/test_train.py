"""Training the embedded model: a stop costs nothing, and gates judge the result."""

import pytest
import torch

from demo import model
from demo.training import attention, train
from demo.training.loss import Scenes
from demo.training.train import TrainingState
from tests.small_models import tiny_scenes
from tests.thoroughness import some_quick

pytestmark = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="training takes torch 2.9's Muon")
TINY = {"sd": tiny_scenes.UNET, "flux": tiny_scenes.FLUX}


def fresh(layout="sd", seed=0):
    torch.manual_seed(seed)
    return TrainingState(model.make(TINY[layout]), 1e-3)


def advance(state, steps):
    scenes = Scenes(0, 2, 32, crop=16)
    return [train.train_step(state, scenes[state.step], seed=0) for _ in range(steps)]


@pytest.mark.parametrize("layout", some_quick(TINY))
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
        weights, start = getattr(state, module).state_dict(), getattr(fresh(layout), module).state_dict()
        for name, value in getattr(resumed, module).state_dict().items():
            assert torch.equal(value, weights[name]) and not torch.equal(value, start[name]), name


@pytest.mark.slow
def test_a_whole_run_of_sdxls_layout_ends_with_weights_and_what_they_are_worth(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(model.LAYOUTS, "sdxl", tiny_scenes.UNET_XL)
    output, state = tmp_path / "weights.safetensors", tmp_path / "state.safetensors"
    assert train.main(["--layout", "sdxl", "--minutes", "0.02", "--batch", "2", "--state", str(state),
                       "--output", str(output)]) == 0
    assert model.load(output).pooled is not None
    said = capsys.readouterr().out
    assert "held-out loss" in said and "level-0 heads" in said


def test_a_file_that_is_no_training_state_is_refused_and_kept(tmp_path, capsys):
    path = tmp_path / "state.safetensors"
    path.write_bytes(b"nothing")
    assert train.main(["--minutes", "1", "--state", str(path)]) == 2
    assert "is no training state" in capsys.readouterr().err and path.read_bytes() == b"nothing"


@pytest.mark.slow
def test_the_shipped_model_passes_its_gates_and_a_gate_that_is_missed_is_told():
    """The gates use fewer pictures here than in training."""
    scene_model = model.load()
    measured = attention.Gates(attention.effective_keys(scene_model, 1), attention.loss_rise(scene_model, 4))
    assert "MISSED" not in str(measured)
    assert str(attention.Gates((0.21, 0.9), 0.29)).count("MISSED") == 2
