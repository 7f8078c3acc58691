"""The benchmark of whole calls in real hosts: what it needs, how it resumes, and its table."""

import os
import sys
from pathlib import Path

import pytest

from benchmarks import doc_tables, host_calls, results
from benchmarks.host_inside import ARMS, COMFYUI, OURS, WEBUI
from benchmarks.models import SD15, SDXL

FOLDERS = {host: os.environ.get(f"{name}_DIR") for host, name in ((COMFYUI, "COMFYUI"), (WEBUI, "WEBUI"))}
SPENT = {"unmerged": 8.0, "built-in": 4.0, **dict(zip(OURS, (3.0, 1.0, 4.0, 2.0), strict=True))}
ROW = {"function": "attend", "version": "1", "torch": "2", "seconds": SPENT, "peak_mib": dict.fromkeys(ARMS, 5.0),
       "round": 0, "failed_arms": {}}  # fmt: skip


@pytest.fixture
def comfyui(tmp_path) -> Path:
    """A folder that looks like ComfyUI's."""
    (tmp_path / "host/comfy").mkdir(parents=True)
    (tmp_path / "host/comfy/samplers.py").touch()
    return tmp_path / "host"


def case_of(host: str, *arguments: str) -> dict:
    options = host_calls.parser().parse_args(["--smoke", "--rounds", "1", *arguments])
    first, *others = host_calls.plan_cases(options, [host]).values()
    assert [case["arm"] for case in (first, *others)] == list(ARMS)
    return first


def test_a_folder_that_is_missing_is_named(comfyui, tmp_path, capsys):
    for arguments, message in (
        ([], "no folder of ComfyUI is named (--comfyui DIR); no folder of A1111 is named (--webui DIR)"),
        (["--comfyui", str(comfyui), "--attention", "comfyui", "webui-sdp"], ": no folder of A1111 is named"),
        (["--webui", str(tmp_path)], "is no folder of A1111: it has no modules/")):  # fmt: skip
        assert host_calls.main(arguments) == 2
        assert message in capsys.readouterr().err


def test_a_stopped_run_goes_on_with_what_is_missing(comfyui, tmp_path, monkeypatch, capsys):
    measured = []

    def measure(case, folder):
        measured.append((case["attention"], case["pixels"], case["arm"]))
        if len(measured) == 3:
            raise KeyboardInterrupt
        arm = {"seconds": {name: SPENT[name] for name in ARMS[case["arm"]]}, "peak_mib": {case["arm"]: 5.0}}
        return {**ROW, **arm}

    monkeypatch.setattr(host_calls, "measure", measure)
    line = ["--comfyui", str(comfyui), "--sizes", "768", "512", "--rounds", "1", "--output", str(tmp_path / "a.json")]
    assert host_calls.main(line) == 130
    assert "[2/18] comfyui, sd15, 512 px, 0, built-in" in capsys.readouterr().err
    assert host_calls.main(line) == 0
    assert measured[:4] == [("comfyui", 512, arm) for arm in ("unmerged", "built-in", "ours", "ours")]
    loaded = results.load(tmp_path / "a.json")
    assert str(comfyui) not in loaded["command"] and "--comfyui ComfyUI --sizes" in loaded["command"]
    assert len(measured) == 19 and capsys.readouterr().out == (tmp_path / "a.md").read_text()
    (whole,) = {tuple(row.values())[3:] for row in host_calls.table_rows([loaded])}
    assert whole == ("1", *host_calls.figures([ROW], "balanced", SD15)[1:]), "arms of a case are one row"


def test_the_table_has_medians_and_how_many_times_as_fast():
    rows = [{**ROW, "seconds": {**SPENT, "unmerged": spent}} for spent in (6.0, 100.0, 8.0)]
    rows = [{**row, "round": number} for number, row in enumerate(rows)]
    for unet in (SD15, SDXL):
        early, of_8 = (host_calls.share_of_early("balanced", unet, steps) for steps in (20, 8))
        means = early * 2 + (1 - early) * 3, of_8 * 3 + (1 - of_8) * 4
        assert host_calls.figures(rows, "balanced", unet) == [
            "3", "8", "4", "3, 4", "1, 2", f"{means[0]:.3g}, {means[1]:.3g}", "2.00", f"{8 / means[0]:.2f}", "5, 5, 5"]
        assert 0 < early < 1


def test_the_readme_has_the_best_and_the_worst_row_of_the_results():
    text = " ".join((Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8").split())
    rows = [row for row in doc_tables._host_rows() if row[host_calls.GAIN] != "n/a"]
    by_gain = sorted(rows, key=lambda row: float(row[host_calls.GAIN]))
    for row in (by_gain[0], by_gain[-1]):
        seconds = (row[head].partition(",")[0] for head in ("unmerged, s", "built-in, s", "mean of 20, 8 steps, s"))
        for figure in (f"{float(row[host_calls.GAIN]):.1f} times as fast", *(f"{float(one):.0f} s" for one in seconds)):
            assert figure in text, row


@pytest.mark.skipif(os.name == "nt", reason="a script is no program there")
def test_an_arm_that_fails_or_is_killed_is_named_and_leaves_the_others(comfyui, monkeypatch, tmp_path):
    """A script stands for the host's Python: it answers, fails, or is killed."""
    script = tmp_path / "python"
    script.write_text(f"""#!{sys.executable}
import json, os, sys
arm = json.loads(sys.argv[3])["arm"]
if arm == "built-in":
    os.kill(os.getpid(), 9)
if arm == "ours":
    sys.exit("it broke")
print("measured: " + json.dumps(dict(function="attend", seconds=dict(unmerged=8.0), peak_mib=5.0)))
""")
    script.chmod(0o755)
    monkeypatch.setenv("COMFYUI_PYTHON", str(script))  # this one outweighs the folder's
    case = case_of(COMFYUI, "--sizes", "64", "--attention", "comfyui")
    rows = [{**case, **host_calls.measure({**case, "arm": arm}, comfyui)} for arm in ARMS]
    assert [row["failed_arms"] for row in rows] == [{}, {"built-in": "out of memory"}, {"ours": "it broke"}]
    assert rows[0]["seconds"] == {"unmerged": 8.0} and rows[0]["peak_mib"] == {"unmerged": 5.0}
    assert host_calls.figures(rows, "balanced", SD15)[1:4] == ["8", "n/a", "n/a"]


@pytest.mark.slow
@pytest.mark.parametrize("unet", [SD15, SDXL])
@pytest.mark.parametrize(("host", "name", "function"), [(COMFYUI, "comfyui-split", "attention_split"),
                                                        (WEBUI, "webui-doggettx", "split_cross_attention_forward")])
def test_a_real_host_is_measured(host, name, function, unet):
    if not FOLDERS[host]:
        pytest.skip(f"needs {host}: COMFYUI_DIR or WEBUI_DIR names its folder")
    case, spent = case_of(host, "--sizes", "512", "--attention", name, "--unet", unet), {}
    for arm in ARMS:
        row = host_calls.measure({**case, "arm": arm}, Path(FOLDERS[host]))
        assert row.get("function") == function and not row["failed_arms"], row
        spent |= row["seconds"]
    assert list(spent) == list(SPENT) and min(spent.values()) > 0
    assert spent["late, kept"] < spent["unmerged"] * (1 if unet == SD15 else 2), "a tiny SDXL gains nothing"
