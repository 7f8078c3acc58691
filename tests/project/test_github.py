"""GitHub's workflows check every change, publish a tag alone, and may do no more than they must."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import install

yaml = pytest.importorskip("yaml", reason="PyYAML comes with omegaconf: python install.py test")
ROOT = Path(__file__).parents[2]
TEXTS = {path.stem: path.read_text("utf-8") for path in (ROOT / ".github" / "workflows").glob("*.yml")}
WORKFLOWS = {name: yaml.safe_load(text) for name, text in TEXTS.items()}
ON = True  # YAML 1.1 reads the key `on` so
PINNED = re.compile(r"[\w.-]+/[\w.-]+@[0-9a-f]{40} # v?\d+(\.\d+)*")
# the rights of a job beyond reading the repository, and the secrets of a workflow
WRITES = {("publish-pypi", "publish"): {"id-token": "write"}}
SECRETS = {"publish-comfy": {"REGISTRY_ACCESS_TOKEN"}}


def test_every_change_is_tested_on_the_oldest_and_the_newest_python_and_torch():
    assert set(WORKFLOWS["ci"][ON]) == {"pull_request", "push", "workflow_call"}
    tests = WORKFLOWS["ci"]["jobs"]["tests"]
    project = install.read_project(ROOT / "pyproject.toml")["project"]
    python, torch = project["requires-python"][2:], project["dependencies"][0].removeprefix("torch>=")
    cases = {(case["python"], case["torch"]) for case in tests["strategy"]["matrix"]["include"]}
    assert cases == {(python, f"{torch}.*"), (python, "newest"), ("3.13", "newest")}
    commands = {step.get("run") for job in WORKFLOWS["ci"]["jobs"].values() for step in job["steps"]}
    assert commands >= {"python install.py demo", "python install.py test", "ruff check ."}


@pytest.mark.parametrize("name", ["publish-comfy", "publish-pypi"])
def test_a_tag_alone_publishes_after_the_checks_and_if_it_is_the_version(name):
    assert WORKFLOWS[name][ON] == {"push": {"tags": ["v*"]}}
    jobs = WORKFLOWS[name]["jobs"]
    assert jobs["ci"]["uses"] == "./.github/workflows/ci.yml"
    steps, job = [], "publish"
    while job != "ci":
        steps = [*jobs[job]["steps"], *steps]
        job = jobs[job]["needs"]
    (check,) = (place for place, step in enumerate(steps) if "tests.release --tag" in step.get("run", ""))
    (publish,) = (place for place, step in enumerate(steps) if "publish" in step.get("uses", ""))
    assert check < publish == len(steps) - 1


def test_a_job_has_no_right_secret_or_foreign_code_that_it_does_not_need():
    for name, workflow in WORKFLOWS.items():
        assert workflow["permissions"] in ({}, {"contents": "read"}) and "pull_request_target" not in workflow[ON]
        assert set(re.findall(r"secrets\.(\w+)", TEXTS[name])) == SECRETS.get(name, set())
        actions = [line for line in re.findall(r"uses: (.+)", TEXTS[name]) if not line.startswith("./")]
        assert all(map(PINNED.fullmatch, actions)), actions
        for job, content in workflow["jobs"].items():
            granted = content.get("permissions", workflow["permissions"])
            assert {right: how for right, how in granted.items() if how != "read"} == WRITES.get((name, job), {})
            for step in content.get("steps", ()):
                assert "${{" not in step.get("run", ""), "a stranger's text becomes a command"
                if step.get("uses", "").startswith("actions/checkout@"):
                    assert step["with"]["persist-credentials"] is False
