"""The demo's whole run, with the embedded model and with the user's, and what it refuses."""

import contextlib
import io
import re
import shutil
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from diffusers import StableDiffusionPipeline
from PIL import Image
from safetensors.torch import save

from demo import checkpoint, command, comparison, comparison_sheet, prompt, sampler
from demo.page import Studio, Wanted
from demo.source import Embedded
from tome_core.settings import presets

ROOT = Path(__file__).parents[2]
STEPS = 2
FIRST = "model.diffusion_model.input_blocks.0.0.weight"


def cell(row, column):
    """The place of a cell in the sheet, which shows pictures of 128 px twice as large."""
    left, top, right, bottom = comparison_sheet.cell(row, column, (256, 256))
    return slice(top, bottom, 2), slice(left, right, 2)


def test_what_differs_is_shown_eight_times_as_strong():
    pictures = np.array([[[7, 0, 100]]], np.uint8), np.array([[[7, 3, 20]]], np.uint8)
    assert comparison_sheet.difference(*pictures).tolist() == [[[0, 24, 255]]]


@pytest.mark.parametrize("seconds, is_rough, words", [
    ([1.2, 1.3, 1.1], True, ("gains nothing", "not to be seen", "100% of")),
    ([0.5, 0.5, 9.0], False, ("2.00 times as fast", "large", " 0% of"))])  # fmt: skip
def test_the_verdict_calls_a_loss_a_loss_and_judges_the_change_by_nearness_and_detail(seconds, is_rough, words):
    rough = np.random.default_rng(0).integers(0, 256, (8, 8, 3), np.uint8)
    merged = rough if is_rough else np.full_like(rough, 128)
    columns = [comparison.Column(None, [rough] * 3, [1.0] * 3, [1.0] * 3),
               comparison.Column(0.5, [merged] * 3, seconds, seconds)]  # fmt: skip
    said = comparison.verdict(columns, on_cpu=False)
    assert all(word in said for word in words) and ("gains nothing" in said) == is_rough


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    """The sheet, and the printed table and progress, of two pictures in two steps at two strengths."""
    path = tmp_path_factory.mktemp("demo") / "new folder" / "comparison.png"
    table, progress = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(table), contextlib.redirect_stderr(progress):
        options = ["--pictures", "2", "--steps", str(STEPS), "--seed", "5", "--strength", "0.5", "--strength", "1"]
        assert command.main([*options, "--report", "--output", str(path), "--device", "cpu"]) == 0
    assert str(path) in table.getvalue() and not list(path.parent.glob("*.part"))
    with Image.open(path) as image:
        return np.array(image), table.getvalue(), progress.getvalue()


def test_the_demo_says_how_far_it_is_and_what_each_strength_cost_and_changed(whole_run):
    _, text, progress = whole_run
    names = "no merging", "strength 0.5 (balanced)", "strength 1 (max)"
    assert all(f"picture 2 of 2, {name}" in progress for name in names)
    for name in names[1:]:
        line = rf"{re.escape(name)} +[\d.]+ s +[\d.]+ +[\d.]+ s +[\d.]+ +[\d.]+ dB +[01]\.\d+ +\d+%\n"
        assert re.search(line, text) and f"{name}: Token merging" in text, text
    assert re.search(r"no merging +[\d.]+ s +1\.00", text) and re.search(r"(gains nothing|times as fast)", text)


@pytest.mark.slow
def test_the_columns_are_a_plain_run_and_what_the_page_draws_and_below_them_what_differs(whole_run):
    sheet, source = whole_run[0], Embedded(torch.device("cpu"))
    for row in range(2):
        plain = sheet[cell(2 * row, 0)]
        tokens = prompt.tokens(source.prompts[row])
        assert np.array_equal(plain, sampler.sample(source.model, tokens, 5 + row, steps=STEPS))
        for column in (1, 2):
            difference = comparison_sheet.difference(plain, sheet[cell(2 * row, column)])
            assert difference.any() and np.array_equal(sheet[cell(2 * row + 1, column)], difference)
    drawn = Studio(source).draw(Wanted(source.prompts[0], 5, STEPS, {"strength": 0.5}), lambda *_: None)
    assert np.array_equal(sheet[cell(0, 1)], drawn.merged)


def test_the_demo_starts_from_another_folder(tmp_path):
    done = subprocess.run([sys.executable, str(ROOT / "demo"), "--help"], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0 and "--pictures" in done.stdout


@pytest.mark.slow
def test_the_users_folder_and_file_are_compared_like_the_embedded_model(tmp_path, tiny_folder, capsys, monkeypatch):
    path = tmp_path / "mine.png"
    common = ["--steps", "2", "--report", "--output", str(path), "--device", "cpu", "--strength", ".3"]
    assert command.main(["--model", str(tiny_folder), "--prompt", "a cat", "--strength", "0", *common]) == 0
    text = capsys.readouterr().out
    assert "strength 0.3: Token merging" in text and str(path) in text
    assert re.search(r"strength 0  .* inf dB  1\.000 +100%\n", text), "strength 0 is off"
    single = tmp_path / "single.safetensors"
    single.write_bytes(save({FIRST: torch.zeros(1, 4, 1, 1)}))
    loaded = Mock(return_value=StableDiffusionPipeline.from_pretrained(tiny_folder))
    monkeypatch.setattr(StableDiffusionPipeline, "from_single_file", loaded)
    assert command.main(["--model", str(single), "--config", str(tiny_folder), *common]) == 0
    loaded.assert_called_once_with(str(single), config=str(tiny_folder), local_files_only=True)
    assert "strength 0.3: Token merging" in capsys.readouterr().out


def refusal(capsys, *arguments):
    """The single sentence of a command line that exits with 2."""
    try:
        code = command.main([str(argument) for argument in arguments])
    except SystemExit as leaving:  # argparse's way
        code = leaving.code
    assert code == 2
    return capsys.readouterr().err.strip().splitlines()[-1]


@pytest.mark.parametrize("arguments, words", [
    (["--pictures", "0"], ["'0'", "1 to 64", "such as"]),
    (["--strength", "nan"], ["'nan'", "from 0", "to 1", "such as"]),
    (["--prompt", "sunset purple"], ["'purple'", "sunset", "cone"]),
    (["--pictures", "1", "--prompt", "day", "--prompt", "night"], ["--pictures 1", "2 prompts", "leave"]),
    (["--model", "no-such-model"], ["no-such-model", "does not exist", "give"]),
    (["--output", "picture.jpg"], ["picture.jpg", "PNG", "give"]),
    (["--output", f"{__file__}/picture.png"], ["picture.png", "cannot be written", "give another place"]),
    (["--config", "somewhere"], ["somewhere", "--model", "leave it out"]),
    (["--device", "abacus"], ["abacus", "leave it out"])], ids=lambda words: "")  # fmt: skip
def test_a_wrong_value_is_one_sentence_with_value_range_and_remedy(arguments, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    sentence = refusal(capsys, "--output", "out.png", *arguments)
    assert all(word in sentence for word in words) and not list(tmp_path.iterdir()), sentence


@pytest.mark.parametrize("name, tensors, words", [
    ("model.PTH", None, "pickle can run any code"), ("model.safetensors", None, "is no such file"),
    ("model.safetensors", {FIRST: torch.zeros(1, 9, 1, 1)}, "takes 9 latent channels"),
    ("model.safetensors", {FIRST: torch.zeros(1, 4, 1, 1), "conditioner.embedders.0.x": torch.zeros(1)}, "refiner"),
    ("model.safetensors", {"lora_unet.weight": torch.zeros(1)}, "no Stable Diffusion UNet")],
                         ids=lambda value: "")  # fmt: skip
def test_a_pickle_is_refused_and_so_are_weights_that_do_not_paint_from_text(tmp_path, capsys, name, tensors, words):
    (tmp_path / name).write_bytes(b"PK\x03\x04" + b"\0" * 60 if tensors is None else save(tensors))
    sentence = refusal(capsys, "--model", tmp_path / name, "--output", tmp_path / "out.png")
    assert name in sentence and words in sentence


def test_a_folder_with_code_or_pickles_is_refused_and_weights_of_half_precision_are_found(tmp_path, tiny_folder,
                                                                                          capsys):  # fmt: skip
    folder = shutil.copytree(tiny_folder, tmp_path / "folder")
    given = ("--output", tmp_path / "out.png", "--model", folder)
    code = folder / "unet" / "mine.py"
    code.write_text("raise SystemExit('run')")
    assert "mine.py is Python code" in refusal(capsys, *given)
    code.unlink()
    plain, other = (folder / part / "diffusion_pytorch_model.safetensors" for part in ("unet", "vae"))
    plain.rename(plain.with_name("diffusion_pytorch_model.fp16.safetensors"))
    assert checkpoint.inspect(folder).variant == "fp16"
    other.rename(other.with_suffix(".bin"))
    assert "vae holds only pickled weights" in refusal(capsys, *given)


def test_options_are_checked_before_torch_is_loaded_and_their_default_is_the_presets():
    """The order matters for more than speed: a setting lets torch's threads sleep only if it precedes the import."""
    code = "import sys; from demo import command, page; command.parser().format_help(); page.parser().format_help();" \
        "sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
    assert presets.MARKS[presets.DEFAULT] == command.BALANCED
