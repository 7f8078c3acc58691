"""The sheet of what the embedded models draw."""

from __future__ import annotations

import pytest
from PIL import Image

from demo import model, prompt, samples
from tests import tiny_scenes


@pytest.mark.slow
def test_the_sheet_has_a_row_for_each_model_and_a_column_for_each_prompt(tmp_path, capsys):
    path = tmp_path / "sheet.png"
    assert samples.main([*map(str, model.CHECKPOINTS), "--steps", "1", "--output", str(path)]) == 0
    columns = len(prompt.PROMPTS) + len(samples.MORE_PROMPTS)
    assert Image.open(path).size == (128 * columns, 128 * len(model.CHECKPOINTS))
    assert str(path) in capsys.readouterr().out


def test_pictures_of_different_sizes_go_on_no_one_sheet(tmp_path, capsys):
    paths = [tmp_path / f"{side}.safetensors" for side in (8, 16)]
    for side, path in zip((8, 16), paths, strict=True):
        model.save(tiny_scenes.make({**tiny_scenes.UNET, "sample_size": side}), path)
    assert samples.main([*map(str, paths), "--steps", "1", "--output", str(tmp_path / "sheet.png")]) == 2
    assert "different sizes" in capsys.readouterr().err and not (tmp_path / "sheet.png").exists()
