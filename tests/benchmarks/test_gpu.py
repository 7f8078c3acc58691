"""The benchmark of a graphics card, on the CPU with tiny models: it ends, resumes after a kill, and says what pays."""

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from benchmarks import gpu, gpu_report, gpu_rows, models, results, timing
from benchmarks.gpu_rows import Bench, OutOfTime, Patched
from tome_core.models.unet_blocks import find_blocks

ROOT = Path(__file__).parents[2]
GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU gets models of the real size, which take minutes")
NOT_THERE = ("diffusers", "tomesd", "gradio", "matplotlib", "PIL", "safetensors", "tqdm", "transformers", "pytest")
WITHOUT = f"""
import sys
sys.modules.update(dict.fromkeys({NOT_THERE}))
from benchmarks import gpu, models
models.BLOCK_SHAPE = models.BLOCK_SHAPE._replace(shrink=4)  # a block is of the real width, and slow
plan = gpu.plan
gpu.plan = lambda device: dict(row for row in plan(device).items() if not row[0].startswith("sdxl"))  # many blocks
sys.exit(gpu.main(sys.argv[1:]))
"""


def start(output):
    return subprocess.Popen([sys.executable, "-c", WITHOUT, "--output", str(output)], cwd=ROOT, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip


def rows_of(path):
    return results.load(path)["rows"] if path.exists() else []


@GPU
@pytest.mark.slow
def test_it_needs_torch_alone_and_goes_on_after_a_kill_with_what_was_there(tmp_path):
    path = tmp_path / "gpu.json"
    killed = start(tmp_path)
    while len(rows_of(path)) < 4 and killed.poll() is None:
        time.sleep(0.05)
    os.kill(killed.pid, signal.SIGTERM if os.name == "nt" else signal.SIGKILL)
    killed.communicate()
    before = rows_of(path)
    whole = start(tmp_path)
    said = whole.communicate()[0]
    assert whole.returncode == 0, said
    record = results.load(path)
    assert 4 <= len(before) < len(record["rows"]) == 8 and record["rows"][: len(before)] == before
    assert record["missing"] == [] and "no plot (" in said and not path.with_suffix(".png").exists()
    for row in record["rows"]:
        assert not {"unmerged", "balanced", "renewed", "kept", gpu_rows.ROW} & set(row.get("failed", ())), row["failed"]
        if "of" in row:
            assert row["merging"]["balanced"] and all(figures["ms"] > 0 for figures in row["of"].values())
            alone = " call, " not in row["key"] or row["key"].endswith(tuple(gpu_rows.HOW))
            assert alone or "tomesd" in row["failed"]["tomesd"]
        if "laws" in row["key"]:
            assert row["equal bits in ten runs"] and row["finite"] and row["removed, the bits of the unmerged call"]
            assert row["merging changes"] > row["another attention function of torch's changes"]


@GPU
def test_few_minutes_end_with_what_is_there_and_a_sheet(tmp_path, monkeypatch, capsys):
    """The run is in this process, so it may not change torch's threads."""
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    monkeypatch.setattr(models, "BLOCK_SHAPE", models.BLOCK_SHAPE._replace(shrink=4))  # a block is of the real width
    path = tmp_path / "gpu.json"
    assert gpu.main(["--minutes", "0.02", "--output", str(tmp_path)]) == 0
    assert 1 <= len(rows_of(path)) < len(gpu.plan("cpu")) and results.load(path)["missing"]
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert "Not measured yet: " in capsys.readouterr().out


def test_the_verdict_says_where_it_pays_and_where_not():
    """The verdict goes by 20 steps, or by calls of which half keep their match; a block has no verdict."""
    def rows(key, **ms):
        return {"key": key, "of": {name: {"ms": value} for name, value in ms.items()}}

    measured = [rows("sd15 call, 512 px"), rows("sd15 sampling of 20 steps, 512 px", unmerged=150.0, balanced=100.0),
                rows("sdxl call, 512 px, compiled", unmerged=40.0, renewed=60.0, kept=40.0),
                rows("block call, 512 px", unmerged=100.0, renewed=60.0, kept=40.0)]  # fmt: skip
    for some, sentences in (
        (measured, "On Card merging by `balanced` pays for sd15 512 px (1.50x as fast). "
                   "It does not pay for sdxl 512 px, compiled (0.80x as fast)."),
        (measured[:2], "On Card merging by `balanced` pays for sd15 512 px (1.50x as fast). "
                       "There is nothing for which it does not pay."),
        (measured[3:], "Nothing measured yet says when merging pays on Card. The same command goes on."),
    ):  # fmt: skip
        assert gpu_report.verdict({"device": {"name": "Card"}, "rows": some}) == sentences


def test_what_fails_is_named_and_the_rest_is_measured_but_for_what_would_not_end_in_time(tmp_path):
    def failing(network, *arguments):
        raise IndexError("short\nlong")

    def runs():
        return sum(range(1000))

    plan = {"a": lambda bench: bench.compare({"x": lambda: partial(failing, 1), "y": lambda: runs}),
            "b": lambda bench: failing(1), "c": lambda bench: {"fact": 1}}  # fmt: skip
    run = results.Run(results.new_record("gpu", "", {}, {}), tmp_path / "gpu.json", list(plan))
    gpu.execute(run, plan, Bench("cpu", time.monotonic() + 100))
    a, b, c = run.record["rows"]
    assert a["failed"] == {"x": "IndexError: short"} and list(a["of"]) == ["y"]
    assert b["failed"] == {gpu_rows.ROW: "IndexError: short"} and c == {"key": "c", "fact": 1}
    with pytest.raises(OutOfTime):
        Bench("cpu", time.monotonic()).compare({"slow": lambda: runs})


def tiny(name):
    """A tiny network and the arguments of its call."""
    settings = "cpu", torch.float32, True
    return models.make(name, *settings), models.inputs(name, 512, *settings)


@pytest.mark.parametrize("name, way, groups", [
    ("sd15", "balanced", []), ("sdxl", "balanced", [4]), ("sdxl", "max", [2]), ("sdxl", gpu_rows.ALONE, []),
    ("sdxl", gpu_rows.ON_AND_OFF, [4])])  # fmt: skip
def test_a_timed_call_does_what_its_row_says(name, way, groups, work):
    """SDXL's whole blocks run on so many of 16 tokens, in each call. Its cells of 4x4 tokens are matched anew."""
    network, arguments = tiny(name)
    patched = Patched(network, way)
    for when, words in (("new", {"match"}), ("renewed", {"renew"} if name == "sd15" else {"match"}), ("kept", set())):
        run = patched.call(arguments, gpu_rows.WHEN[when])
        with torch.inference_mode():
            run()
            for _ in range(2):
                work.clear()
                patched.handle.reset_counts()
                run()
                assert set(work) == words, when
                assert [left for _, left in patched.handle.report().block_tokens] == groups, when
                assert patched.handle.is_installed == (way != gpu_rows.ON_AND_OFF)


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
def test_a_row_of_a_compiled_model_says_that_whole_blocks_do_not_merge(monkeypatch):
    small = models.TINY[models.SDXL]._replace(depths=(0, 1, 2), middle=1)
    monkeypatch.setitem(models.TINY, models.SDXL, small)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    with torch.inference_mode():
        row = gpu_rows.calls(Bench("cpu", time.monotonic() + 600), models.SDXL, 512, "compiled")
    assert list(row["of"]) == ["unmerged", "renewed", "kept"] and not row["failed"]
    assert "64 tokens in 8 groups" in row["merging"]["balanced"] and "whole blocks on" not in row["merging"]["balanced"]
    assert "compiled without merging, its parts merge" in row["merging"]["balanced"]


def test_the_rows_that_tell_most_come_first_and_each_way_has_a_line():
    keys = list(gpu.plan("cuda"))
    assert keys[2] == "sdxl call, 1024 px" and keys.index("sdxl call, 1024 px, cudagraphs") < keys.index(
        "sd15 call, 1024 px, compiled") < keys.index("sdxl call, 512 px")  # fmt: skip
    of = {"unmerged": {"ms": 9.0}, "max, renewed": {"ms": 5.0}, "max, kept": {"ms": 4.0}}
    lines = gpu_report.calls_table([{"key": keys[2], "of": of}]).splitlines()
    assert lines[2:] == ["| sdxl 1024 px | 9 | n/a | n/a | n/a | n/a |",
                         "| sdxl 1024 px, max | n/a | n/a | 5 | 4 | n/a |"]  # fmt: skip


def test_our_kernels_are_told_from_others():
    others = {f"void at::native::{number:02d}": float(number) for number in range(1, 20)}
    told = timing.by_kernel([*others.items(), ("_ridge", 25.0), ("_spread_by_others", 0.5), ("_ridge", 25.0)])
    assert told == dict(list(others.items())[:6:-1], _ridge=50.0)
    rows = results.load(results.FOLDER / "card-h200-2026-11-26.json")["rows"]
    assert ("sdxl 2048 px, our kernels: renewed 35.65 of 195.7 ms, 18% (us: _ridge 27,857, _mean_rows 7,796); "
            "kept 6.94 of 151.5 ms, 5% (us: _mean_rows 6,942).") in gpu_report.kernel_lines(rows)  # fmt: skip


@pytest.mark.parametrize("name, millions, blocks", [("sd15", 860, [5, 5, 5, 1]), ("sdxl", 2567, [0, 10, 60, 0])])
def test_models_have_the_real_size_and_every_way_changes_a_twin_alone(name, millions, blocks):
    with torch.device("meta"):
        real = models.UNet(models.SHAPES[name])
    assert round(sum(parameter.numel() for parameter in real.parameters()) / 1e6) == millions
    halvings = [place.halvings for place in find_blocks(real)]
    assert [halvings.count(depth) for depth in range(4)] == blocks
    network, arguments = tiny(name)
    with torch.inference_mode():
        plain = network(*arguments)
        assert torch.isfinite(plain).all() and plain.std() > 1e-3
        for way in (gpu_rows.TOMESD, *gpu_rows.STRENGTHS):
            copied = models.copy_sharing_weights(network)
            assert not torch.equal(Patched(copied, way).call(arguments)(), plain), way
            assert next(copied.parameters()).data_ptr() == next(network.parameters()).data_ptr()
        assert torch.equal(network(*arguments), plain)


def test_runs_take_turns_and_the_peak_of_a_call_is_seen():
    called = []
    runs = {name: partial(called.append, name) for name in "abc"}
    assert [len(times) for times in timing.in_turns(runs, 4).values()] == [4, 4, 4]
    rounds = ["".join(called[number : number + 3]) for number in range(0, 12, 3)]
    assert all(set(names) == {*"abc"} for names in rounds) and len(set(rounds)) > 1
    torch.ones(1, 2**18).sum()  # libraries allocate some memory once
    peak = timing.process_peak(lambda: torch.ones(64, 2**18).sum())
    assert peak is None or 60 < peak < 70
