"""Results are whole files at every moment, a killed run goes on where it was, and committed tables are theirs."""

from __future__ import annotations

import json
import subprocess

import pytest

from benchmarks import report, results

ENVIRONMENT = {"commit": "abc", "versions": {"torch": "2"}, "device": {"kind": "cpu", "name": "x"}}
KEYS = ["a", "b", "c"]


def record(settings=None, kind="gpu", **changes):
    return {**results.new_record(kind, "python -m x", settings or {"pixels": (512, 768)}, ENVIRONMENT), **changes}


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
    """Another run has other settings, versions of other packages, or device; a complete file has nothing missing."""
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


def test_a_run_goes_on_under_later_releases_of_ours_whose_commits_it_names_once(tmp_path):
    versions = [{"torch": "2", "tome_core": number} for number in ("1", "2", "3")]
    run = fill(results.Run.start(record(versions=versions[0]), KEYS, folder=tmp_path), rows=1)
    for number, later in enumerate(versions[1:], 1):
        run = results.Run.start(record(versions=later, commit="def"), KEYS, run.path)
        assert run.missing == KEYS[number:] and run.record["commit"] == "abc, def"
        fill(run, rows=1)


def test_a_row_is_added_once_if_it_is_planned_and_its_values_are_numbers(tmp_path):
    run = fill(results.Run.start(record(), KEYS, folder=tmp_path), rows=1)
    for key, value in (("a", 1), ("z", 1), ("b", float("nan"))):
        with pytest.raises(ValueError):
            run.add(key, {"value": value})
    assert results.load(run.path)["missing"] == ["b", "c"]


def test_a_file_that_is_no_result_is_named_with_what_is_wrong(tmp_path):
    path = tmp_path / "file.json"
    for telling, text in (
        ("cannot be read", None), ("no JSON", "{"), ("is no result", "[1]"), ("is no result", "{}"),
        ("is no result", json.dumps({**record(), "rows": {}})), ("is no result", json.dumps(record(kind="taste"))),
        ("is no result", json.dumps({**record(), "rows": [{"value": 1}]})),
    ):  # fmt: skip
        if text is not None:
            path.write_text(text)
        with pytest.raises(results.ResultError, match=telling) as caught:
            results.load(path)
        assert str(path) in str(caught.value)


def test_a_result_names_device_versions_and_a_commit_that_says_whether_files_differ_from_it(tmp_path):
    def git(*arguments):
        identity = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
        subprocess.run(["git", "-C", tmp_path, *identity, *arguments], check=True, capture_output=True)

    described = results.describe("cpu")
    assert described["versions"]["torch"] and described["device"]["name"] and described["device"]["threads"] >= 1
    assert results.commit(tmp_path / "nowhere") is None
    git("init")
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "-m", "x")
    clean = results.commit(tmp_path)
    (tmp_path / "new").write_text("untracked files change nothing that runs")
    assert clean and results.commit(tmp_path) == clean
    (tmp_path / "file").write_text("2")
    assert results.commit(tmp_path) == f"{clean}+changes"


def test_a_table_that_is_kept_is_made_from_its_result():
    """But for results whose code went after they had been measured."""
    for table in results.FOLDER.glob("*.md"):
        path = table.with_suffix(".json")
        if json.loads(path.read_text(encoding="utf-8"))["kind"] in results.KINDS:
            assert table.read_text(encoding="utf-8") == report.table([path]) + "\n", table.name
