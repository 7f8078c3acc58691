"""The demo's whole run, on the embedded model and on the user's own, and what it refuses."""

from __future__ import annotations

import contextlib
import io
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

import tome_core
from demo import checkpoint, command, comparison, comparison_sheet, comparison_table, metrics, model, prompt, sampler
from demo.page import Studio, Wanted
from demo.source import Embedded, tell_times
from tests import tiny_pipeline, tiny_scenes
from tome_core.settings import presets

ROOT = Path(__file__).parents[2]
STEPS, STRENGTHS = 2, (None, 0.5, 1.0)
CELL = (256, 256)  # of a sheet, for pictures of 128 px
PICKLE = "pickle can run any code"


# --- figures ----------------------------------------------------------------------------------------------------------


def columns_with(plain, merged, pictures=None):
    blank = [np.zeros((8, 8, 3), np.uint8)] * len(plain)
    ours, theirs = pictures or (blank, blank)
    return [comparison.Column(None, ours, plain, plain), comparison.Column(0.5, theirs, merged, merged)]


def test_equal_pictures_are_infinitely_alike_and_a_known_difference_has_its_psnr():
    a = np.random.default_rng(0).integers(0, 200, (16, 16, 3), np.uint8)
    assert metrics.psnr(a, a) == np.inf and metrics.ssim(a, a) == pytest.approx(1)
    assert metrics.psnr(a, a + np.uint8(51)) == pytest.approx(20 * np.log10(5))
    b = a.copy()
    b[0, 0], b[1, 1] = a[0, 0] + 3, a[1, 1] + 55
    shown = comparison_sheet.difference(a, b)
    assert np.array_equal(shown, comparison_sheet.difference(b, a))
    assert shown[0, 0].tolist() == [24] * 3 and shown[1, 1].tolist() == [255] * 3 and shown.sum() == 3 * (24 + 255)


def test_a_loss_is_called_a_loss_a_gain_has_its_size_and_the_change_is_judged_by_nearness_and_detail():
    assert "gains nothing" in comparison_table.verdict(columns_with([1.0, 1.0], [1.2, 1.3]), on_cpu=True)
    gain = comparison_table.verdict(columns_with([2.0, 2.0, 2.0], [1.0, 1.0, 9.0]), on_cpu=False)
    assert "2.00 times as fast" in gain and "gains nothing" not in gain
    rough = np.random.default_rng(0).integers(0, 256, (8, 8, 3), np.uint8)
    for merged, words in ((rough, ("not to be seen", "100% of")), (np.full_like(rough, 128), ("large", " 0% of"))):
        said = comparison_table.verdict(columns_with([2.0], [1.0], ([rough], [merged])), on_cpu=False)
        assert all(word in said for word in words)


# --- a whole run ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    """Two pictures in two steps at two strengths: the PNG's path, and the printed table and progress."""
    path = tmp_path_factory.mktemp("demo") / "new folder" / "comparison.png"
    table, progress = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(table), contextlib.redirect_stderr(progress):
        options = ["--pictures", "2", "--steps", str(STEPS), "--seed", "5", "--strength", "0.5", "--strength", "1"]
        assert command.main([*options, "--report", "--output", str(path), "--device", "cpu"]) == 0
    return path, table.getvalue(), progress.getvalue()


def shown(path, row, column):
    """The picture in a cell of the sheet, at its own 128 px."""
    with Image.open(path) as image:
        return np.array(image.crop(comparison_sheet.cell(row, column, CELL)))[::2, ::2]


def test_the_demo_says_how_far_it_is_and_what_each_strength_cost_and_changed(whole_run):
    path, text, progress = whole_run
    names = [comparison.heading(strength) for strength in STRENGTHS]
    assert names == ["no merging", "strength 0.5 (balanced)", "strength 1 (max)"]
    assert all(f"picture 2 of 2, {name}" in progress for name in names)
    assert str(path) in text and not list(path.parent.glob("*.part"))
    for name in names[1:]:
        line = rf"{re.escape(name)} +[\d.]+ s +[\d.]+ +[\d.]+ s +[\d.]+ +[\d.]+ dB +[01]\.\d+ +\d+%\n"
        assert re.search(line, text) and f"{name}: Token merging" in text, text
    assert re.search(r"no merging +[\d.]+ s +1\.00", text) and re.search(r"(gains nothing|times as fast)", text)


def test_the_sheet_has_a_label_on_every_row_and_column_and_the_judgement_below(whole_run):
    with Image.open(whole_run[0]) as image:
        assert image.format == "PNG"
        pixels = np.array(image.convert("L"))
    right, bottom = comparison_sheet.cell(3, 2, CELL)[2:]
    assert pixels.shape[1] == right + comparison_sheet.GAP
    assert (pixels[bottom:] < 128).sum() > 200 and (pixels[-4:] > 200).all(), "no judgement, or a cut one"
    heads = [comparison_sheet.cell(0, column, CELL)[:2] for column in range(3)]
    boxes = [(left, top - comparison_sheet.HEAD, left + 256, top) for left, top in heads]
    for left, top, right, bottom in (*boxes, *(comparison_sheet.cell(row, 0, CELL) for row in (1, 3))):
        label = pixels[top:bottom, left:right]
        assert 200 < (label < 128).sum() < label.size / 4, "no readable heading or prompt"
    for row in (1, 3):
        _, top, right, bottom = comparison_sheet.cell(row, 0, CELL)
        assert (pixels[top:bottom, right : right + comparison_sheet.GAP] > 200).all(), "the prompt runs on"


def test_the_columns_are_a_plain_run_and_what_the_page_draws_and_below_them_what_differs(whole_run):
    source = Embedded(torch.device("cpu"))
    for row in range(2):
        tokens = prompt.tokens(source.prompts[row])
        plain = shown(whole_run[0], 2 * row, 0)
        assert np.array_equal(plain, sampler.sample(source.model, tokens, 5 + row, steps=STEPS))
        for column in (1, 2):
            merged = shown(whole_run[0], 2 * row, column)
            assert not np.array_equal(merged, plain)
            difference = comparison_sheet.difference(plain, merged)
            assert np.array_equal(shown(whole_run[0], 2 * row + 1, column), difference)
    drawn = Studio(source).draw(Wanted(source.prompts[0], 5, STEPS, {"strength": 0.5}), lambda *_: None)
    assert np.array_equal(shown(whole_run[0], 0, 1), drawn.merged)
    with tome_core.patch(source.target, "balanced"):
        without_times = source.picture(source.prompts[0], 5, STEPS, lambda: None)
    assert not np.array_equal(without_times, drawn.merged), "this test does not see whether the steps' times are told"


def test_a_merging_model_is_told_the_time_of_every_step():
    times = []
    source = SimpleNamespace(timesteps=lambda steps: [900.0, 500.0, 100.0])
    merging = SimpleNamespace(set_time=lambda timestep, sampling: times.append(timestep))
    on_step = tell_times(source, 3, merging, lambda: None)
    for _ in range(3):
        on_step()
    assert times == [900.0, 500.0, 100.0]


def test_the_readme_shows_the_sheet_of_the_demo_as_it_is():
    """A new layout asks for a new picture: python install.py demo --output demo/demo.png"""
    first = ROOT / re.search(r"!\[.*?\]\((.*?)\)", (ROOT / "README.md").read_text(encoding="utf-8"))[1]
    with Image.open(first) as image:
        assert image.width == comparison_sheet.cell(0, 1 + len(comparison.STRENGTHS), CELL)[0]
    for column in range(1, 1 + len(comparison.STRENGTHS)):
        differs = comparison_sheet.difference(shown(first, 0, 0), shown(first, 0, column))
        assert differs.any() and np.array_equal(shown(first, 1, column), differs)
    assert first.stat().st_size < 1e6


def test_the_demo_starts_from_another_folder_that_has_a_demo_of_its_own(tmp_path):
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "__main__.py").write_text("print('the wrong one')")
    done = subprocess.run([sys.executable, str(ROOT / "demo"), "--help"], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0 and "--pictures" in done.stdout


@pytest.mark.slow
def test_the_users_folder_and_file_are_compared_like_the_embedded_model(tmp_path, tiny_folder, capsys):
    path = tmp_path / "mine.png"
    common = ["--steps", "2", "--report", "--output", str(path), "--device", "cpu"]
    assert command.main(["--model", str(tiny_folder), "--pictures", "2", "--prompt", "a cat",
                         "--strength", ".3", "--strength", "0", *common]) == 0  # fmt: skip
    text = capsys.readouterr().out
    assert re.search(r"strength 0\.3: Token merging", text) and str(path) in text
    assert re.search(r"strength 0  .* inf dB  1\.000 +100%\n", text), "strength 0 is off"
    single = tiny_pipeline.write_single_file(tmp_path / "single.safetensors")
    config = shutil.copytree(tiny_folder, tmp_path / "config", ignore=shutil.ignore_patterns("*.safetensors"))
    assert command.main(["--model", str(single), "--config", str(config), "--pictures", "1", *common]) == 0
    assert re.search(r"strength 0\.5 \(balanced\): Token merging", capsys.readouterr().out)


# --- refusals ---------------------------------------------------------------------------------------------------------


def refusal(capsys, *arguments):
    """The one sentence of the command line, which ends with 2."""
    try:
        code = command.main([str(argument) for argument in arguments])
    except SystemExit as leaving:  # argparse's way
        code = leaving.code
    assert code == 2
    return capsys.readouterr().err.strip().splitlines()[-1]


def test_a_wrong_value_is_one_sentence_with_value_range_and_remedy(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for arguments, words in (
        (["--pictures", "0"], ["'0'", "1 to 64", "such as"]),
        *((["--strength", text], [repr(text), "from 0", "to 1", "such as"]) for text in ("2", "-0.1", "nan", "half")),
        (["--steps", "many"], ["'many'", "1 to 1000", "such as"]),
        (["--seed", "-1"], ["'-1'", "0 to", "such as"]),
        (["--prompt", "sunset purple"], ["'purple'", "sunset", "cone"]),
        (["--pictures", "1", "--prompt", "day", "--prompt", "night"], ["--pictures 1", "2 prompts", "leave"]),
        (["--model", "no-such-model"], ["no-such-model", "does not exist", "give"]),
        (["--output", "picture.jpg"], ["picture.jpg", "PNG", "give"]),
        (["--config", "somewhere"], ["somewhere", "--model", "leave it out"]),
        (["--device", "abacus"], ["abacus", "leave it out"]),
    ):
        sentence = refusal(capsys, *(arguments if "--output" in arguments else [*arguments, "--output", "out.png"]))
        assert all(word in sentence for word in words), sentence
        assert not list(tmp_path.iterdir())


def test_pickles_and_code_are_refused_with_the_reason_whatever_they_call_themselves(tmp_path, tiny_folder, capsys):
    for name in ("model.ckpt", "model.PTH", "model.safetensors"):
        (tmp_path / name).write_bytes(b"PK\x03\x04" + b"\0" * 60)
        words = ["is no such file"] if name.endswith(".safetensors") else [name, PICKLE, "safetensors"]
        sentence = refusal(capsys, "--model", tmp_path / name, "--output", tmp_path / "out.png")
        assert all(word in sentence for word in words), sentence
    folder = shutil.copytree(tiny_folder, tmp_path / "folder")
    (folder / "unet" / "mine.py").write_text("raise SystemExit('run')")
    assert "mine.py is Python code" in refusal(capsys, "--model", folder, "--output", tmp_path / "out.png")
    (folder / "unet" / "mine.py").unlink()
    (folder / "vae" / "diffusion_pytorch_model.safetensors").rename(folder / "vae" / "diffusion_pytorch_model.bin")
    sentence = refusal(capsys, "--model", folder, "--output", tmp_path / "out.png")
    assert "vae" in sentence and PICKLE in sentence


def test_a_checkpoint_is_known_by_its_tensors_and_refused_if_it_cannot_paint_from_text(tmp_path, tiny_folder, capsys):
    first = "model.diffusion_model.input_blocks.0.0.weight"
    for tensors, reason in (
        ({first: torch.zeros(1, 9, 1, 1)}, "takes 9 latent channels"),
        ({first: torch.zeros(1, 4, 1, 1), "conditioner.embedders.0.x": torch.zeros(1)}, "refiner"),
        ({"lora_unet.weight": torch.zeros(1)}, "no Stable Diffusion UNet"),
    ):
        save_file(tensors, tmp_path / "model.safetensors")
        with pytest.raises(ValueError, match=reason):
            checkpoint.inspect(tmp_path / "model.safetensors")
    folder = shutil.copytree(tiny_folder, tmp_path / "half")
    assert checkpoint.inspect(folder).variant is None
    plain = folder / "unet" / "diffusion_pytorch_model.safetensors"
    plain.rename(plain.with_name("diffusion_pytorch_model.fp16.safetensors"))
    assert checkpoint.inspect(folder).variant == "fp16"
    single = tiny_pipeline.write_single_file(tmp_path / "single.safetensors")
    sentence = refusal(capsys, "--model", single, "--output", tmp_path / "out.png", "--device", "cpu")
    assert "--config DIR" in sentence


def test_any_scene_model_is_taken_and_asked_for_words_that_it_knows(tmp_path, capsys):
    path = tmp_path / "tiny.safetensors"
    model.save(tiny_scenes.make(), path)
    given = ["--model", str(path), "--device", "cpu", "--output", str(tmp_path / "a.png")]
    options = command.parser().parse_args(given)
    source = command.source_of(options, command.check(options))
    assert source.name == path.name and set(source.prompts) == set(prompt.PROMPTS)
    assert source.picture("night sea", 0, 1, lambda: None).shape == (32, 32, 3)
    assert "'purple'" in refusal(capsys, *given, "--prompt", "purple")


def test_options_are_checked_before_torch_is_loaded_and_their_default_is_the_presets():
    """Not for speed alone: torch's threads sleep while they wait only if that is said before torch is loaded."""
    code = "import sys; from demo import command, page; command.parser().format_help(); page.parser().format_help();" \
        "assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert presets.MARKS[presets.DEFAULT] == command.BALANCED
