"""Result files are complete at every moment, a killed run resumes, and committed tables agree with the results."""

import importlib
import json
import shlex

import pytest

from benchmarks import results
from benchmarks.variants import GROUPS, VARIANTS

ENVIRONMENT = {"commit": "abc", "versions": {"torch": "2"}, "device": {"kind": "cpu", "name": "x"}}
KEYS = ["a", "b", "c"]


def record(**changes):
    return {**results.new_record("gpu", "python -m x", {"pixels": (512, 768)}, ENVIRONMENT), **changes}


def fill(run, rows=None):
    for key in run.missing[:rows]:
        run.add(key, {"value": ord(key)})
    return run


def test_a_killed_run_goes_on_with_the_same_rows_and_comes_back_as_it_was_saved_a_line_a_row(tmp_path):
    whole = fill(results.Run.start(record(), KEYS, tmp_path / "whole.json"))
    killed = fill(results.Run.start(record(), KEYS, folder=tmp_path), rows=1)
    again = results.Run.start(record(), KEYS, folder=tmp_path)
    assert again.path == killed.path and again.missing == ["b", "c"]
    assert fill(again).record["rows"] == whole.record["rows"] and again.missing == []
    assert results.load(again.path) == again.record and not list(tmp_path.glob("*.part"))
    assert '\n{"key": "b", "value": 98},\n' in again.path.read_text(encoding="utf-8")


def test_a_kill_while_writing_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    run = fill(results.Run.start(record(), KEYS, folder=tmp_path), rows=1)
    before = run.path.read_bytes()

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(results.os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        fill(run, rows=1)
    assert run.path.read_bytes() == before


def test_another_run_begins_a_new_file_and_never_touches_a_given_one(tmp_path):
    """Another run has other settings, package versions or another device; a complete file lacks nothing."""
    killed = fill(results.Run.start(record(), KEYS, folder=tmp_path), rows=1)
    before = killed.path.read_bytes()
    for change in ({"settings": {"pixels": [512]}}, {"versions": {"torch": "3"}}, {"device": {"name": "y"}}):
        other = results.Run.start(record(**change), KEYS, folder=tmp_path)
        assert other.path != killed.path and other.missing == KEYS
        with pytest.raises(results.ResultError, match=f"other {next(iter(change))}"):
            results.Run.start(record(**change), KEYS, killed.path)
    assert killed.path.read_bytes() == before
    done = fill(killed)
    assert results.Run.start(record(), KEYS, folder=tmp_path).path != done.path
    assert results.Run.start(record(), KEYS, done.path).missing == []


def test_a_file_that_is_no_result_is_named(tmp_path):
    path = tmp_path / "file.json"
    for text in ("{", "[1]", "{}", json.dumps({**record(), "rows": {}}), json.dumps(record(kind="taste"))):
        path.write_text(text)
        with pytest.raises(results.ResultError, match="is no result") as caught:
            results.load(path)
        assert str(path) in str(caught.value)


COMMITTED = sorted(results.FOLDER.glob("*.json"))
_NOW_CALLED = {"card": "gpu"}


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_a_committed_result_has_a_table_and_a_command_that_the_project_knows(path):
    """Rows of variants that are gone may be left in a result, but its command must name none."""
    record = results.load(path)
    module = importlib.import_module(f"benchmarks.{results.KINDS[record['kind']]}")
    text = module.table([record])
    assert text
    if path.with_suffix(".md").exists():
        assert path.with_suffix(".md").read_text(encoding="utf-8") == f"{text}\n"
    _, _, name, *arguments = shlex.split(record["command"])
    command = name.rpartition(".")[2]
    command = importlib.import_module(f"benchmarks.{_NOW_CALLED.get(command, command)}")
    if hasattr(command, "parser"):
        options = command.parser().parse_args(arguments)
        assert set(getattr(options, "variants", ())) <= {*VARIANTS, *GROUPS}
