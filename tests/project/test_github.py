"""What GitHub reads: workflows that check what is promised and may do no more than they must, and issue forms."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from pathlib import Path

import pytest

import install
from tests import release
from tome_core import Report
from tome_core.reporting.ledger import LevelTally

yaml = pytest.importorskip("yaml", reason="PyYAML comes with omegaconf: python install.py test")
ROOT = Path(__file__).parents[2]
WORKFLOWS = {path.stem: path for path in sorted((ROOT / ".github" / "workflows").glob("*.yml"))}
FORMS = {path.stem: path for path in sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))}
PUBLISHING = ("publish-comfy", "publish-pypi")
# what a job may do beyond reading the repository, and the secrets it is given
MAY = {("publish-pypi", "publish"): {"id-token": "write"}}
SECRETS = {"publish-comfy": {"REGISTRY_ACCESS_TOKEN"}}
PINNED = re.compile(r"[\w.-]+/[\w.-]+@[0-9a-f]{40} # v?\d+(\.\d+)*")


def read(path: Path) -> dict:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def triggers(workflow: dict) -> dict:
    """YAML 1.1 reads the key `on` as true."""
    return workflow[True]


def commands(job: dict) -> str:
    return "\n".join(step.get("run", "") for step in job.get("steps", ()))


def project() -> dict:
    return install.read_project(ROOT / "pyproject.toml")["project"]


# --- what is checked --------------------------------------------------------------------------------------------------


def test_the_oldest_and_the_newest_python_and_torch_are_tested():
    cases = read(WORKFLOWS["ci"])["jobs"]["tests"]["strategy"]["matrix"]["include"]
    oldest_python = project()["requires-python"].removeprefix(">=")
    oldest_torch = project()["dependencies"][0].removeprefix("torch>=")
    assert {case["python"] for case in cases} == {oldest_python, "3.13"}
    assert {case["torch"] for case in cases} == {f"{oldest_torch}.*", "newest"}
    assert {case["python"] for case in cases if case["torch"] == "newest"} == {oldest_python, "3.13"}


def test_what_is_tested_are_the_commands_of_the_readme():
    jobs, readme = read(WORKFLOWS["ci"])["jobs"], (ROOT / "README.md").read_text(encoding="utf-8")
    for command in install.COMMANDS.keys() & {"demo", "test"}:
        line = f"python install.py {command}"
        assert line in commands(jobs["tests"]).splitlines() and line in readme
    assert "ruff check ." in commands(jobs["ruff"])


def test_torch_is_a_cpu_build_that_nothing_replaces():
    said = commands(read(WORKFLOWS["ci"])["jobs"]["tests"])
    assert "--index-url https://download.pytorch.org/whl/cpu" in said and "PIP_CONSTRAINT=" in said


def test_every_change_is_checked_and_so_is_every_release():
    assert set(WORKFLOWS) == {"ci", *PUBLISHING}
    assert set(triggers(read(WORKFLOWS["ci"]))) == {"pull_request", "push", "workflow_call"}
    for name in PUBLISHING:
        jobs = read(WORKFLOWS[name])["jobs"]
        assert jobs["ci"]["uses"] == "./.github/workflows/ci.yml"
        for job in set(jobs) - {"ci"}:
            assert leads_to_ci(jobs, job), f"{name}: {job} does not wait for the checks"


def leads_to_ci(jobs: dict, name: str) -> bool:
    needed = jobs[name].get("needs", [])
    needed = [needed] if isinstance(needed, str) else needed
    return "ci" in needed or any(leads_to_ci(jobs, one) for one in needed)


# --- what is published ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PUBLISHING)
def test_a_tag_alone_publishes_and_is_held_against_the_version_before_anything_is_published(name):
    assert triggers(read(WORKFLOWS[name])) == {"push": {"tags": ["v*"]}}
    jobs = read(WORKFLOWS[name])["jobs"]
    lines = [(job, step) for job in jobs for step in jobs[job].get("steps", ())]
    checks = [n for n, (_, step) in enumerate(lines) if step.get("run", "").startswith("python -m tests.release --tag")]
    publishes = [n for n, (_, step) in enumerate(lines) if "publish" in step.get("uses", "")]
    assert len(checks) == len(publishes) == 1 and checks[0] < publishes[0]
    assert shlex.split(lines[checks[0]][1]["run"])[:4] == ["python", "-m", release.__name__, "--tag"]
    assert lines[checks[0]][0] in {lines[publishes[0]][0], jobs[lines[publishes[0]][0]]["needs"]}


def test_pypi_is_given_no_token_and_both_distributions():
    jobs = read(WORKFLOWS["publish-pypi"])["jobs"]
    step = jobs["publish"]["steps"][-1]
    assert step["uses"].startswith("pypa/gh-action-pypi-publish@") and "with" not in step
    assert jobs["publish"]["environment"] == "pypi"
    assert "python -m build" in commands(jobs["build"]).splitlines(), "makes the sdist and the wheel from it"


def test_comfyui_is_given_its_token_as_a_secret():
    step = read(WORKFLOWS["publish-comfy"])["jobs"]["publish"]["steps"][-1]
    assert step["uses"].startswith("Comfy-Org/publish-node-action@")
    assert step["with"] == {"personal_access_token": "${{ secrets.REGISTRY_ACCESS_TOKEN }}"}


# --- what a workflow may do -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WORKFLOWS)
def test_a_workflow_reads_and_only_the_job_that_must_writes(name):
    workflow = read(WORKFLOWS[name])
    assert workflow["permissions"] in ({}, {"contents": "read"})
    for job, facts in workflow["jobs"].items():
        granted = facts.get("permissions", workflow["permissions"])
        assert isinstance(granted, dict)
        assert {what: how for what, how in granted.items() if how != "read"} == MAY.get((name, job), {})


@pytest.mark.parametrize("name", WORKFLOWS)
def test_secrets_are_where_they_are_needed(name):
    assert set(re.findall(r"secrets\.(\w+)", WORKFLOWS[name].read_text(encoding="utf-8"))) == SECRETS.get(name, set())
    assert "pull_request_target" not in triggers(read(WORKFLOWS[name]))


def test_other_peoples_actions_are_pinned_and_say_their_version():
    pins = set()
    for path in WORKFLOWS.values():
        for used in re.findall(r"uses: (.+)", path.read_text(encoding="utf-8")):
            if not used.startswith("./"):
                assert PINNED.fullmatch(used), f"{path.name}: {used}"
                pins.add(used)
    assert len({pin.split("@")[0] for pin in pins}) == len(pins), "one action at two versions"


@pytest.mark.parametrize("name", WORKFLOWS)
def test_nothing_that_a_stranger_writes_becomes_a_command_and_a_checkout_leaves_no_credentials_behind(name):
    for step in (step for job in read(WORKFLOWS[name])["jobs"].values() for step in job.get("steps", ())):
        assert "${{" not in step.get("run", ""), step
        if step.get("uses", "").startswith("actions/checkout@"):
            assert step["with"]["persist-credentials"] is False


# --- issue forms ------------------------------------------------------------------------------------------------------


def fields(name: str) -> dict[str, dict]:
    """The questions of a form."""
    return {field["id"]: field for field in read(FORMS[name])["body"] if field["type"] != "markdown"}


def test_every_issue_starts_from_a_form():
    assert read(FORMS["config"]) == {"blank_issues_enabled": False}
    assert set(FORMS) == {"config", "problem", "wish"}


@pytest.mark.parametrize("name", ["problem", "wish"])
def test_a_form_is_one_that_github_accepts(name):
    form = read(FORMS[name])
    assert set(form) == {"name", "description", "body"}
    asked = [field for field in form["body"] if field["type"] != "markdown"]
    labels = [field["attributes"]["label"] for field in asked]
    assert len(fields(name)) == len(asked) == len(set(labels))
    for field in asked:
        assert field["type"] in ("input", "textarea", "dropdown") and re.fullmatch(r"[\w-]+", field["id"])
        assert set(field) <= {"type", "id", "attributes", "validations"}
        assert bool(field["attributes"].get("options")) == (field["type"] == "dropdown")


def test_a_problem_comes_with_its_report_host_versions_model_size_and_settings():
    asked = fields("problem")
    for name in ("report", "host", "versions", "model", "size", "settings"):
        assert asked[name]["validations"] == {"required": True}


def test_the_form_says_where_the_report_is_and_how_it_looks():
    said = read(FORMS["problem"])["body"][0]["attributes"]["value"]
    assert "tome_core.report(pipe)" in said and "Apply ToMe" in said and '"ToMe: ..."' in said
    example = fields("problem")["report"]["attributes"]["placeholder"]
    level = LevelTally(1, 5, Counter({("attn", 4096, 2048, 2048): 100}), work_full=4, work_left=1)
    real = Report(True, ("ratio=0.5",), 20, (level,))
    assert example.splitlines() == str(real).splitlines()[: len(example.splitlines())]


def test_the_forms_hosts_are_ours():
    options = " ".join(fields("problem")["host"]["attributes"]["options"])
    assert all(name in options for name in ("AUTOMATIC1111", "Forge", "reForge", "ComfyUI", "diffusers"))
