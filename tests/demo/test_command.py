"""The demo's whole run, on the embedded model and on the user's own."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from demo import command, comparison, comparison_sheet, comparison_table, metrics
from tests import tiny_pipeline

ROOT = Path(__file__).parents[2]
STEPS = 2
NAMES = [comparison.heading(strength) for strength in (None, *comparison.STRENGTHS)]


def test_equal_pictures_are_infinitely_alike_and_a_known_difference_has_its_psnr():
    a = np.random.default_rng(0).integers(0, 200, (16, 16, 3), np.uint8)
    assert metrics.psnr(a, a) == np.inf and metrics.ssim(a, a) == pytest.approx(1)
    assert metrics.psnr(a, a + np.uint8(51)) == pytest.approx(20 * np.log10(5))


def columns_with(plain, merged):
    blank = [np.zeros((8, 8, 3), np.uint8)] * len(plain)
    both = (None, plain), (0.5, merged)
    return [comparison.Column(strength, blank, seconds, seconds) for strength, seconds in both]


def test_a_loss_is_called_a_loss():
    assert "gains nothing" in comparison_table.verdict(columns_with([1.0, 1.0], [1.2, 1.3]), on_cpu=True)


def test_a_gain_is_told_with_its_size_and_where_it_was_measured():
    text = comparison_table.verdict(columns_with([2.0, 2.0, 2.0], [1.0, 1.0, 9.0]), on_cpu=False)
    assert "2.00 times as fast" in text and "gains nothing" not in text


def test_the_change_is_judged_by_how_far_the_pictures_are_apart_and_detail_by_its_share():
    columns = columns_with([2.0], [1.0])
    rough = np.random.default_rng(0).integers(0, 256, (8, 8, 3), np.uint8)
    columns[0].pictures, columns[1].pictures = [rough], [rough]
    said = comparison_table.verdict(columns, on_cpu=False)
    assert "not to be seen" in said and "100% of" in said
    columns[1].pictures = [np.full_like(rough, 128)]
    said = comparison_table.verdict(columns, on_cpu=False)
    assert "large" in said and " 0% of" in said


def test_a_difference_map_is_black_where_pictures_agree_and_eightfold_elsewhere():
    a = np.zeros((4, 4, 3), np.uint8)
    b = a.copy()
    b[0, 0], b[1, 1] = 3, 200
    assert comparison_sheet.difference(a, b)[0, 0].tolist() == [24] * 3
    assert comparison_sheet.difference(b, a)[1, 1].tolist() == [255] * 3
    assert comparison_sheet.difference(a, b).sum() == 3 * (24 + 255)


def run_demo(*arguments):
    command_line = [sys.executable, "-m", "demo", *(str(argument) for argument in arguments)]
    return subprocess.run(command_line, capture_output=True, text=True, cwd=ROOT, check=False)


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    """Two pictures in two steps from a real command line; gives the process and the PNG's path."""
    path = tmp_path_factory.mktemp("demo") / "new folder" / "comparison.png"
    return run_demo("--pictures", 2, "--steps", STEPS, "--seed", 5, "--report", "--output", path), path


def shown(path, row, column):
    """The picture in a cell of the sheet, at its own 128 px."""
    with Image.open(path) as image:
        return np.array(image.crop(comparison_sheet.cell(row, column, (256, 256))))[::2, ::2]


def test_the_demo_ends_well_and_says_how_far_it_is_and_where_the_picture_is(whole_run):
    done, path = whole_run
    assert done.returncode == 0, done.stderr
    assert all(f"picture 2 of 2, {name}" in done.stderr for name in NAMES)
    assert str(path) in done.stdout
    assert not list(path.parent.glob("*.part"))


def test_the_table_has_a_line_for_every_setting(whole_run):
    text = whole_run[0].stdout
    assert NAMES == ["no merging", "strength 0.25 (quality)", "strength 0.5 (balanced)", "strength 1 (max)"]
    for name in NAMES[1:]:
        line = rf"{re.escape(name)} +[\d.]+ s +[\d.]+ +[\d.]+ s +[\d.]+ +[\d.]+ dB +[01]\.\d+ +\d+%\n"
        assert re.search(line, text), text
        assert f"{name}: Token merging" in text
    assert re.search(r"no merging +[\d.]+ s +1\.00", text)
    assert re.search(r"(gains nothing|times as fast)", text)


def test_the_sheet_has_a_label_on_every_row_and_column_and_the_judgement_below(whole_run):
    _, path = whole_run
    with Image.open(path) as image:
        assert image.format == "PNG"
        pixels = np.array(image.convert("L"))
    right, bottom = comparison_sheet.cell(3, 3, (256, 256))[2:]
    assert pixels.shape[1] == right + comparison_sheet.GAP
    assert (pixels[bottom:] < 128).sum() > 200 and (pixels[-4:] > 200).all(), "no judgement, or one cut off"
    for column in range(4):
        left, top = comparison_sheet.cell(0, column, (256, 256))[:2]
        head = pixels[top - comparison_sheet.HEAD : top, left : left + 256]
        assert 200 < (head < 128).sum() < head.size / 4, f"no readable heading over column {column}"
    for row in (1, 3):
        left, top, right, bottom = comparison_sheet.cell(row, 0, (256, 256))
        label = pixels[top:bottom, left:right]
        assert 200 < (label < 128).sum() < label.size / 4, f"no readable prompt in row {row}"
        beside = pixels[top:bottom, right : right + comparison_sheet.GAP]
        assert (beside > 200).all(), f"the prompt of row {row} runs on"


def test_the_readme_shows_the_sheet_of_the_demo_as_it_is():
    """A new layout asks for a new picture: python install.py demo --output demo/demo.png"""
    first = ROOT / re.search(r"!\[.*?\]\((.*?)\)", (ROOT / "README.md").read_text(encoding="utf-8"))[1]
    with Image.open(first) as image:
        assert image.width == comparison_sheet.cell(0, len(NAMES), (256, 256))[0]
    for column in range(1, len(NAMES)):
        differs = comparison_sheet.difference(shown(first, 0, 0), shown(first, 0, column))
        assert differs.any() and np.array_equal(shown(first, 1, column), differs)
    assert first.stat().st_size < 1e6


@pytest.mark.slow
def test_the_unmerged_column_is_what_a_plain_run_makes(whole_run, tmp_path):
    _, path = whole_run
    code = (
        "import sys, numpy; from demo import model, prompt, sampler, source; m = model.load();"
        f"numpy.save(sys.argv[1], [sampler.sample(m, prompt.tokens(source.Embedded.prompts[i]), 5 + i, steps={STEPS})"
        " for i in range(2)])"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "plain.npy")], cwd=ROOT, check=True)
    plain = np.load(tmp_path / "plain.npy")
    for row in range(2):
        assert np.array_equal(shown(path, 2 * row, 0), plain[row])


@pytest.mark.slow
def test_a_strength_is_told_the_time_as_on_the_page(whole_run, tmp_path):
    """Both in a process of their own, with as many threads: the bits depend on these."""
    _, path = whole_run
    code = (
        "import sys, numpy, torch, tome_core; from demo.source import Embedded; from demo.page import Studio, Wanted;"
        "source = Embedded(torch.device('cpu'));"
        f"wanted = Wanted(source.prompts[0], 5, {STEPS}, {{'strength': 0.5}});"
        "drawn = Studio(source).draw(wanted, lambda *_: None); tome_core.patch(source.target, 'balanced');"
        f"untold = source.picture(source.prompts[0], 5, {STEPS}, lambda: None);"
        "numpy.save(sys.argv[1], [drawn.merged, untold])"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "merged.npy")], cwd=ROOT, check=True)
    page, untold = np.load(tmp_path / "merged.npy")
    assert np.array_equal(shown(path, 0, 2), page)
    assert not np.array_equal(untold, page), "without the time a strength keeps no match: this test sees nothing"


def test_merged_columns_differ_and_their_difference_maps_are_theirs(whole_run):
    _, path = whole_run
    for row in range(2):
        plain = shown(path, 2 * row, 0)
        for column in (1, 2, 3):
            merged = shown(path, 2 * row, column)
            assert not np.array_equal(merged, plain)
            assert np.array_equal(shown(path, 2 * row + 1, column), comparison_sheet.difference(plain, merged))


def test_the_demo_starts_from_another_folder_that_has_a_demo_of_its_own(tmp_path):
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "__main__.py").write_text("print('the wrong one')")
    done = subprocess.run([sys.executable, str(ROOT / "demo"), "--help"], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0 and "--pictures" in done.stdout


@pytest.mark.slow
def test_a_diffusers_folder_is_compared_like_the_embedded_model(tmp_path, tiny_folder, capsys):
    path = tmp_path / "mine.png"
    code = command.main(["--model", str(tiny_folder), "--pictures", "2", "--steps", "2", "--prompt", "a cat",
                         "--strength", ".3", "--strength", "0", "--report", "--output", str(path),
                         "--device", "cpu"])  # fmt: skip
    text = capsys.readouterr().out
    assert code == 0 and str(path) in text
    assert re.search(r"strength 0\.3: Token merging", text)
    assert re.search(r"strength 0  .* inf dB  1\.000 +100%\n", text), "strength 0 is off"
    with Image.open(path) as image:
        assert image.size[0] == comparison_sheet.cell(3, 2, (256, 256))[2] + comparison_sheet.GAP


@pytest.mark.slow
def test_a_single_file_is_loaded_with_a_configuration_that_has_no_weights(tmp_path, tiny_folder, capsys):
    single = tiny_pipeline.write_single_file(tmp_path / "single.safetensors")
    bare = shutil.ignore_patterns("*.safetensors")
    config = shutil.copytree(tiny_folder, tmp_path / "config", ignore=bare)
    path = tmp_path / "mine.png"
    code = command.main(["--model", str(single), "--config", str(config), "--pictures", "1", "--steps", "2",
                         "--output", str(path), "--device", "cpu", "--report"])  # fmt: skip
    text = capsys.readouterr()
    assert code == 0, text.err
    assert re.search(r"strength 0\.5 \(balanced\): Token merging", text.out)
    assert path.exists()
