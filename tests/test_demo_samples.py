"""The sheet of what the embedded models draw."""

from __future__ import annotations

from PIL import Image

from demo import model, prompt, samples


def test_the_sheet_has_a_row_for_each_model_and_a_column_for_each_prompt(tmp_path, capsys):
    path = tmp_path / "sheet.png"
    assert samples.main([*map(str, model.CHECKPOINTS), "--steps", "1", "--output", str(path)]) == 0
    columns = len(prompt.PROMPTS) + len(samples.MORE_PROMPTS)
    assert Image.open(path).size == (128 * columns, 128 * len(model.CHECKPOINTS))
    assert str(path) in capsys.readouterr().out


def test_a_file_that_is_no_model_is_refused(tmp_path, capsys):
    other = tmp_path / "other.safetensors"
    other.write_bytes(b"nothing")
    assert samples.main([str(other), "--output", str(tmp_path / "sheet.png")]) == 2
    assert "holds no scene model" in capsys.readouterr().err
    assert not (tmp_path / "sheet.png").exists()
