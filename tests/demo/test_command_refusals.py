"""What the demo refuses, and that it does so in one sentence before anything is begun."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from demo import checkpoint, command, model, prompt
from tests import tiny_pipeline, tiny_scenes
from tome_core.settings import presets


def refusal(capsys, *arguments):
    """Exit code and the one sentence, from the real command line."""
    try:
        code = command.main([str(argument) for argument in arguments])
    except SystemExit as leaving:  # argparse's way
        code = leaving.code
    return code, capsys.readouterr().err.strip().splitlines()[-1]


PICKLE = "pickle can run any code"


@pytest.mark.parametrize("name", ["model.ckpt", "model.pt", "model.PTH", "model.bin", "model.safetensors"])
def test_a_pickled_checkpoint_is_refused_with_the_reason_whatever_it_calls_itself(tmp_path, capsys, name):
    (tmp_path / name).write_bytes(b"PK\x03\x04" + b"\0" * 60)
    words = ["is no such file"] if name.endswith(".safetensors") else [name, PICKLE, "safetensors"]
    code, sentence = refusal(capsys, "--model", tmp_path / name, "--output", tmp_path / "out.png")
    assert code == 2 and all(word in sentence for word in words), sentence


def test_a_folder_with_pickled_weights_only_or_with_code_is_refused_naming_the_part(tmp_path, tiny_folder, capsys):
    folder = shutil.copytree(tiny_folder, tmp_path / "folder")
    (folder / "unet" / "mine.py").write_text("raise SystemExit('run')")
    code, sentence = refusal(capsys, "--model", folder, "--output", tmp_path / "out.png")
    assert code == 2 and "mine.py is Python code" in sentence
    (folder / "unet" / "mine.py").unlink()
    (folder / "vae" / "diffusion_pytorch_model.safetensors").rename(folder / "vae" / "diffusion_pytorch_model.bin")
    code, sentence = refusal(capsys, "--model", folder, "--output", tmp_path / "out.png")
    assert code == 2 and "vae" in sentence and PICKLE in sentence


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--pictures", "0"], ["'0'", "1 to 64", "such as"]),
        *((["--strength", wrong], [repr(wrong), "from 0", "to 1", "such as"]) for wrong in
          ("2", "-0.1", "nan", "inf", "1e400", "9" * 400, "half")),
        (["--steps", "many"], ["'many'", "1 to 1000", "such as"]),
        (["--seed", "-1"], ["'-1'", "0 to", "such as"]),
        (["--prompt", "sunset purple"], ["'purple'", "sunset", "cone"]),
        (["--pictures", "1", "--prompt", "day", "--prompt", "night"], ["--pictures 1", "2 prompts", "leave"]),
        (["--model", "no-such-model"], ["no-such-model", "does not exist", "give"]),
        (["--output", "picture.jpg"], ["picture.jpg", "PNG", "give"]),
        (["--config", "somewhere"], ["somewhere", "--model", "leave it out"]),
        (["--device", "abacus"], ["abacus", "leave it out"]),
    ],
)
def test_a_wrong_value_is_one_sentence_with_value_range_and_remedy(tmp_path, monkeypatch, capsys, arguments, words):
    monkeypatch.chdir(tmp_path)
    given = arguments if "--output" in arguments else [*arguments, "--output", "out.png"]
    code, sentence = refusal(capsys, *given)
    assert code == 2
    assert all(word in sentence for word in words), sentence
    assert not list(tmp_path.iterdir())


def test_any_scene_model_is_taken_and_asked_for_words_that_it_knows(tmp_path, capsys):
    path = tmp_path / "tiny.safetensors"
    model.save(tiny_scenes.make(), path)
    given = ["--model", str(path), "--device", "cpu", "--output", str(tmp_path / "a.png")]
    options = command.parser().parse_args(given)
    source = command.source_of(options, command.check(options))
    assert source.name == path.name and set(source.prompts) == set(prompt.PROMPTS)
    assert source.picture("night sea", 0, 1, lambda: None).shape == (32, 32, 3)
    code, sentence = refusal(capsys, "--model", path, "--prompt", "purple", "--output", tmp_path / "a.png")
    assert code == 2 and "'purple'" in sentence


def test_checkpoints_that_cannot_paint_from_text_are_refused(tmp_path):
    first = "model.diffusion_model.input_blocks.0.0.weight"
    cases = {
        "inpainting": ({first: torch.zeros(1, 9, 1, 1)}, "takes 9 latent channels"),
        "refiner": ({first: torch.zeros(1, 4, 1, 1), "conditioner.embedders.0.x": torch.zeros(1)}, "refiner"),
        "lora": ({"lora_unet.weight": torch.zeros(1)}, "no Stable Diffusion UNet"),
    }
    for name, (tensors, reason) in cases.items():
        save_file(tensors, tmp_path / f"{name}.safetensors")
        with pytest.raises(ValueError, match=reason):
            checkpoint.inspect(tmp_path / f"{name}.safetensors")


def test_half_precision_folders_are_loaded_as_their_variant(tmp_path, tiny_folder):
    folder = shutil.copytree(tiny_folder, tmp_path / "half")
    assert checkpoint.inspect(folder).variant is None
    plain = folder / "unet" / "diffusion_pytorch_model.safetensors"
    plain.rename(plain.with_name("diffusion_pytorch_model.fp16.safetensors"))
    assert checkpoint.inspect(folder).variant == "fp16"


def test_a_single_file_without_any_configuration_is_told_about_the_option(tmp_path, capsys):
    single = tiny_pipeline.write_single_file(tmp_path / "single.safetensors")
    code, sentence = refusal(capsys, "--model", single, "--output", tmp_path / "out.png", "--device", "cpu")
    assert code == 2 and "--config DIR" in sentence


@pytest.mark.parametrize("entry", ["command", "page"])
def test_options_are_checked_before_torch_is_loaded(entry):
    """Not for speed alone: torch's threads sleep while they wait only where that is said before it is loaded."""
    code = f"import sys; from demo.{entry} import parser; parser().format_help(); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_what_the_options_call_the_default_is_the_presets():
    assert presets.MARKS[presets.DEFAULT] == command.BALANCED
