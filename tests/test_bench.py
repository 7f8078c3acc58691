"""The benchmark runs, agrees with tomesd, and its memory figures keep to what is claimed; speeds are only printed."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tome_core import bench


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    file = tmp_path_factory.mktemp("bench") / "result.json"
    command = [sys.executable, "-m", "tome_core.bench", "--repeats", "1", "--json", str(file)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    print(done.stdout)
    return json.loads(file.read_text()), done.stdout


def test_it_prints_what_it_measured(result):
    data, text = result
    assert data["environment"]["torch"] in text
    rows = ("merge, 4,096", "unmerge, 4,096", "match + merge + unmerge, 16,384", "SD1.5 block", "peak memory")
    for name in (*rows, "window 16", "shared", "k+v .75 sized", "k+v .9375 sized"):
        assert name in text
    assert all(value > 0 for times in data["ms_4096"].values() for value in times.values())


def test_merging_and_matching_agree_with_tomesd(result):
    difference = result[0]["difference_from_tomesd"]
    assert difference["unmerge(merge(x))"] <= 1e-6
    assert difference["chosen similarity"] <= 1e-5


@pytest.mark.skipif(sys.platform == "win32", reason="peak memory of a process is not to be had on Windows")
def test_peak_memory_is_at_most_a_quarter_of_tomesds(result):
    peak = result[0]["peak_mib_16384"]
    assert 10 < peak["ours"] <= peak["tomesd"] / 4


def test_a_block_is_timed_with_and_without_merging():
    vanilla, merged = bench.time_block(repeats=1, side=16)
    assert vanilla > 0 and merged > 0


def test_nothing_is_patched_after_timing():
    block = bench.make_block()
    run = bench._patched_run(block, bench.make_inputs(8, 1, "cpu", bench.torch.float32), bench._TOMESDS)
    run()
    assert not any("forward" in vars(module) or "_forward" in vars(module) for module in block.modules())


@pytest.mark.parametrize(("arguments", "telling"), [(["--repeats", "0"], "from 1 up"), (["--device", "tpu"], "cpu")])
def test_a_wrong_option_is_refused(arguments, telling, capsys):
    with pytest.raises(SystemExit) as caught:
        bench.main(arguments)
    assert caught.value.code == 2 and telling in capsys.readouterr().err
