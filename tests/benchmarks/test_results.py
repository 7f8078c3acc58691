"""Results are whole files at every moment, and a killed run goes on where it was."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from benchmarks import report, results

ENVIRONMENT = {"commit": "abc", "versions": {"torch": "2"}, "device": {"kind": "cpu", "name": "x"}}
KEYS = ["a", "b", "c"]
TABLES = sorted((Path(__file__).parents[2] / "benchmarks" / "results").glob("*.md"))


def record(settings=None, kind="gpu", **changes):
    return {**results.new_record(kind, "python -m x", settings or {"pixels": (512, 768)}, ENVIRONMENT), **changes}


def fill(run, rows=None):
    for key in run.missing[:rows]:
        run.add(key, {"value": ord(key)})
    return run


def test_a_record_comes_back_as_it_was_saved(tmp_path):
    run = fill(results.Run.start(record(), KEYS, folder=tmp_path))
    assert results.load(run.path) == run.record
    assert [row["key"] for row in run.record["rows"]] == KEYS and run.record["missing"] == []
    assert not list(tmp_path.glob("*.part"))


def test_a_killed_run_goes_on_with_the_same_rows(tmp_path):
    whole = fill(results.Run.start(record(), KEYS, tmp_path / "whole.json"))
    killed = fill(results.Run.start(record(), KEYS, folder=tmp_path), rows=1)
    again = results.Run.start(record(), KEYS, folder=tmp_path)
    assert again.path == killed.path and again.missing == ["b", "c"]
    assert fill(again).record["rows"] == whole.record["rows"]


def test_a_kill_while_writing_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    run = fill(results.Run.start(record(), KEYS, folder=tmp_path), rows=1)
    before = run.path.read_bytes()

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(results.os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        fill(run, rows=1)
    assert run.path.read_bytes() == before


@pytest.mark.parametrize(
    "change",
    [{"settings": {"pixels": [512]}}, {"versions": {"torch": "3"}}, {"device": {"kind": "cpu", "name": "y"}}],
    ids=lambda change: next(iter(change)),
)
def test_other_settings_begin_a_new_file_and_never_touch_a_given_one(tmp_path, change):
    killed = fill(results.Run.start(record(), KEYS, folder=tmp_path), rows=1)
    before = killed.path.read_bytes()
    other = results.Run.start(record(**change), KEYS, folder=tmp_path)
    assert other.path != killed.path and other.missing == KEYS
    with pytest.raises(results.ResultError, match=f"other {next(iter(change))}"):
        results.Run.start(record(**change), KEYS, killed.path)
    assert killed.path.read_bytes() == before


def test_a_run_goes_on_under_later_releases_of_ours_whose_commits_it_names_once(tmp_path):
    versions = [{"torch": "2", "tome_core": number} for number in ("1", "2", "3")]
    run = fill(results.Run.start(record(versions=versions[0]), KEYS, folder=tmp_path), rows=1)
    for number, later in enumerate(versions[1:], 1):
        run = results.Run.start(record(versions=later, commit="def"), KEYS, run.path)
        assert run.missing == KEYS[number:] and run.record["commit"] == "abc, def"
        fill(run, rows=1)


def test_a_complete_result_is_not_measured_over(tmp_path):
    done = fill(results.Run.start(record(), KEYS, folder=tmp_path))
    assert results.Run.start(record(), KEYS, folder=tmp_path).path != done.path
    with pytest.raises(results.ResultError, match="complete"):
        results.Run.start(record(), KEYS, done.path)


def test_a_row_is_added_once_and_only_where_planned(tmp_path):
    run = fill(results.Run.start(record(), KEYS, folder=tmp_path), rows=1)
    for key in ("a", "z"):
        with pytest.raises(ValueError, match="not missing"):
            run.add(key, {})
    with pytest.raises(ValueError, match="same key"):
        results.Run.start(record({"other": 1}), ["a", "a"], folder=tmp_path)


def test_no_number_is_no_result(tmp_path):
    run = results.Run.start(record(), KEYS, folder=tmp_path)
    with pytest.raises(ValueError):
        run.add("a", {"value": float("nan")})
    assert not run.path.exists()


@pytest.mark.parametrize(
    ("text", "telling"),
    [
        (None, r"file\.json cannot be read"),
        ("{", "no JSON"),
        ("[1]", "holds a list"),
        ("{}", "'kind' is missing"),
        (json.dumps({**record(), "rows": {}}), "'rows' is not a list"),
        (json.dumps({**record(), "kind": "taste"}), "kind is 'taste'"),
        (json.dumps({**record(), "rows": [{"value": 1}]}), "no key"),
    ],
)
def test_a_file_that_is_no_result_is_named_with_what_is_wrong(tmp_path, text, telling):
    path = tmp_path / "file.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(results.ResultError, match=telling) as caught:
        results.load(path)
    assert str(path) in str(caught.value)


def test_an_environment_says_versions_and_device():
    described = results.describe("cpu")
    assert described["versions"]["torch"] and described["versions"]["tome_core"]
    assert described["device"]["kind"] == "cpu" and described["device"]["name"]
    assert described["device"]["threads"] >= 1
    json.dumps(described)


def test_a_commit_says_whether_files_differ_from_it(tmp_path):
    def git(*arguments):
        identity = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
        subprocess.run(["git", "-C", tmp_path, *identity, *arguments], check=True, capture_output=True)

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


@pytest.mark.parametrize("table", TABLES, ids=lambda path: path.stem)
def test_a_table_that_is_kept_is_made_from_its_result(table):
    assert table.read_text(encoding="utf-8") == report.write([table.with_suffix(".json")], None, None) + "\n"
