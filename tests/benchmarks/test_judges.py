"""Judges: what a benchmark says without one, and how the history gives it back."""

import subprocess

import pytest

from benchmarks import judges, own_error, pooled, quality, renewal


@pytest.fixture
def history(tmp_path, monkeypatch) -> None:
    """A clone whose history has the contents of one judge."""
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    blob = subprocess.run(["git", "hash-object", "-w", "--stdin"], cwd=tmp_path, input=b"weights", capture_output=True,
                          check=True).stdout.decode().strip()  # fmt: skip
    monkeypatch.setattr(judges, "ROOT", tmp_path)
    monkeypatch.setattr(judges, "FOLDER", tmp_path / "benchmarks")
    monkeypatch.setattr(judges, "BLOBS", {"one": blob, "other": blob[::-1]})


@pytest.mark.parametrize("command", [own_error, pooled, quality, renewal], ids=lambda module: module.__name__)
def test_a_benchmark_without_its_judge_names_the_command_that_brings_it(command, tmp_path, capsys, monkeypatch):
    name = "scenes-flux" if command is pooled else "scenes128-b"
    path = tmp_path / f"{name}.safetensors"
    assert command.main(["--model", str(path), "--output", str(tmp_path / "result.json")]) == 2
    assert f"python -m benchmarks.judges {name} takes" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_a_judge_comes_from_the_history_once_and_a_shallow_clone_is_told_what_to_do(history, capsys):
    assert judges.main(["one"]) == judges.main(["one"]) == 0
    assert judges.path_of("one").read_bytes() == b"weights"
    assert judges.main([]) == 2
    assert "the history of this clone has no other: it is shallow" in capsys.readouterr().err
    assert [path.name for path in judges.FOLDER.iterdir()] == ["one.safetensors"]
