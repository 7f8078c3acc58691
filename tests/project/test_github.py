"""GitHub's workflows check every change, publish a tag alone, and may do no more than they must; the issue forms."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

import install
from tome_core import Report
from tome_core.reporting.ledger import LevelTally

yaml = pytest.importorskip("yaml", reason="PyYAML comes with omegaconf: python install.py test")
ROOT = Path(__file__).parents[2]


def read(path: Path) -> dict:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


FILES = {path.stem: path for path in sorted((ROOT / ".github" / "workflows").glob("*.yml"))}
WORKFLOWS = {name: read(path) for name, path in FILES.items()}
FORMS = {path.stem: read(path) for path in sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))}
JOBS = [(name, job) for name, workflow in WORKFLOWS.items() for job in workflow["jobs"]]
STEPS = [step for name, job in JOBS for step in WORKFLOWS[name]["jobs"][job].get("steps", ())]
ON = True  # YAML 1.1 reads the key `on` so
PUBLISHING = ("publish-comfy", "publish-pypi")
# the rights of a job beyond reading the repository, and the secrets of a workflow
WRITES = {("publish-pypi", "publish"): {"id-token": "write"}}
SECRETS = {"publish-comfy": {"REGISTRY_ACCESS_TOKEN"}}
PINNED = re.compile(r"[\w.-]+/[\w.-]+@[0-9a-f]{40} # v?\d+(\.\d+)*")


def commands(name: str, job: str) -> list[str]:
    return [step["run"] for step in WORKFLOWS[name]["jobs"][job]["steps"] if "run" in step]


def test_every_change_runs_the_commands_of_the_readme_on_the_oldest_and_the_newest_python_and_torch():
    assert set(WORKFLOWS) == {"ci", *PUBLISHING}
    assert set(WORKFLOWS["ci"][ON]) == {"pull_request", "push", "workflow_call"}
    cases = WORKFLOWS["ci"]["jobs"]["tests"]["strategy"]["matrix"]["include"]
    project = install.read_project(ROOT / "pyproject.toml")["project"]
    oldest_python, oldest_torch = project["requires-python"][2:], project["dependencies"][0].removeprefix("torch>=")
    assert {(case["python"], case["torch"]) for case in cases} == {
        (oldest_python, f"{oldest_torch}.*"), (oldest_python, "newest"), ("3.13", "newest")}  # fmt: skip
    assert {"python install.py demo", "python install.py test"} <= set(commands("ci", "tests"))
    assert "ruff check ." in commands("ci", "ruff")


@pytest.mark.parametrize("name", PUBLISHING)
def test_a_tag_alone_publishes_after_the_checks_and_after_it_was_held_against_the_version(name):
    assert WORKFLOWS[name][ON] == {"push": {"tags": ["v*"]}}
    jobs = WORKFLOWS[name]["jobs"]
    assert jobs["ci"]["uses"] == "./.github/workflows/ci.yml"
    order, job = [], "publish"
    while job != "ci":
        order = [*jobs[job]["steps"], *order]
        job = jobs[job]["needs"]
    (check,) = (place for place, step in enumerate(order) if "tests.release --tag" in step.get("run", ""))
    (publish,) = (place for place, step in enumerate(order) if "publish" in step.get("uses", ""))
    assert check < publish == len(order) - 1
    token = {"personal_access_token": "${{ secrets.REGISTRY_ACCESS_TOKEN }}"}
    assert order[publish].get("with") == (token if name == "publish-comfy" else None)  # PyPI trusts the file


def test_a_job_writes_and_a_workflow_has_a_secret_only_if_it_must():
    for name, job in JOBS:
        workflow = WORKFLOWS[name]
        assert workflow["permissions"] in ({}, {"contents": "read"}) and "pull_request_target" not in workflow[ON]
        granted = workflow["jobs"][job].get("permissions", workflow["permissions"])
        assert {right: how for right, how in granted.items() if how != "read"} == WRITES.get((name, job), {})
        text = FILES[name].read_text(encoding="utf-8")
        assert set(re.findall(r"secrets\.(\w+)", text)) == SECRETS.get(name, set())


def test_actions_of_others_are_pinned_and_no_text_of_a_stranger_becomes_a_command():
    used = {line for path in FILES.values() for line in re.findall(r"uses: (.+)", path.read_text(encoding="utf-8"))}
    pins = {line for line in used if not line.startswith("./")}
    assert not [line for line in pins if not PINNED.fullmatch(line)]
    assert len({line.split("@")[0] for line in pins}) == len(pins), "one action at two versions"
    for step in STEPS:
        assert "${{" not in step.get("run", ""), step
        if step.get("uses", "").startswith("actions/checkout@"):
            assert step["with"]["persist-credentials"] is False


def test_a_problem_is_told_in_a_form_that_asks_for_the_report_as_the_engine_prints_it():
    assert FORMS["config"] == {"blank_issues_enabled": False} and set(FORMS) == {"config", "problem", "wish"}
    fields = {field["id"]: field for field in FORMS["problem"]["body"] if field["type"] != "markdown"}
    for name in ("report", "host", "versions", "model", "size", "settings"):
        assert fields[name]["validations"] == {"required": True}
    level = LevelTally(1, 5, Counter({("attn", 4096, 2048, 2048): 100}), work_full=4, work_left=1)
    real = str(Report(True, ("ratio=0.5",), 20, (level,))).splitlines()
    example = fields["report"]["attributes"]["placeholder"].splitlines()
    assert example == real[: len(example)]
