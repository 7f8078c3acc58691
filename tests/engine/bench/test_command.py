"""The benchmark runs, and its memory figures keep to what is claimed; speeds are only printed."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from tests.conformance import held, ragged
from tome_core import patch
from tome_core.attention.core import BIAS, WIDER_HEADS
from tome_core.bench import command as bench
from tome_core.bench.sd_block import CrossAttention, make_block, make_inputs
from tome_core.model.families import find_blocks


@pytest.mark.slow
def test_it_prints_and_writes_what_it_measured(tmp_path):
    file = tmp_path / "result.json"
    command = [sys.executable, "-m", "tome_core.bench", "--repeats", "1", "--json", str(file)]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    data = json.loads(file.read_text())
    assert data["environment"]["torch"] in text
    rows = ("merge, 4,096", "unmerge, 4,096", "match + merge + unmerge, 16,384", "SD1.5 block", "peak memory")
    for name in (*rows, "shared", "k+v .75 sized", "k+v .9375 sized"):
        assert name in text
    assert all(value > 0 for times in data["ms_4096"].values() for value in times.values())
    assert all(f"{mode} {peak:.2f} MiB" in text for mode, peak in data["peak_mib_16384"].items())


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="peak memory of a process is not to be had on Windows")
def test_peak_memory_is_at_most_a_quarter_of_tomesds():
    pytest.importorskip("tomesd")
    ours, theirs = (bench.measure_memory(which, 128, "cpu") for which in ("ours", "tomesd"))  # 16,384 tokens
    assert 10 < ours <= theirs / 4


def test_a_block_is_timed_with_and_without_merging():
    vanilla, merged = bench.time_block(repeats=1, side=16)
    assert vanilla > 0 and merged > 0


def test_nothing_is_patched_after_timing():
    block = make_block()
    bench._patched_run(block, make_inputs(8, 1, "cpu", torch.float32), bench._TOMESDS)()
    assert not any("forward" in vars(module) or "_forward" in vars(module) for module in block.modules())


def test_its_block_is_found_in_a_unet_with_stages():
    assert [place.path for place in find_blocks(make_block())] == ["input_blocks.0.0.transformer_blocks.0"]


def test_its_attention_is_known_and_takes_sizes():
    module = CrossAttention(64, 64, heads=4).requires_grad_(False)
    x, keys = (torch.randn(2, count, 64, generator=torch.Generator().manual_seed(count)) * 4 for count in (12, 5))
    ways = held(lambda one, tokens, context: one(tokens, context), module, x, keys, ragged(2, 40, 5))
    assert ways == {BIAS, WIDER_HEADS}


@pytest.mark.parametrize("config", bench._SIZED.values(), ids=bench._SIZED)
def test_what_is_timed_as_sized_is_sized(config):
    unet = make_block()
    with patch(unet, config) as handle, torch.inference_mode():
        unet(*make_inputs(16, 2, "cpu", torch.float32))
        (level,) = handle.report().levels
        assert list(level.routes) == [BIAS]


@pytest.mark.parametrize("arguments, telling", [
    ("--repeats 0", "from 1 up"), ("--device tpu", "cpu"),
    ("--host-time --dtype float16", "leave --device and --dtype out"),
])  # fmt: skip
def test_a_wrong_option_is_refused(arguments, telling, capsys):
    with pytest.raises(SystemExit) as caught:
        bench.main(arguments.split())
    assert caught.value.code == 2 and telling in capsys.readouterr().err
