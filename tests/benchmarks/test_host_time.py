"""What merging costs the host, by counts: calls of our functions, changes of file, operators; times are printed."""

from __future__ import annotations

import sys
from collections import Counter

import pytest
import torch

from benchmarks import host_time, models, python_calls
from tests.most_calls import MOST_CALLS, MOST_CALLS_LEFT_ALONE, MOST_CALLS_SWITCHED_OFF, MOST_CHANGES
from tests.operators import VIEWS, OperatorCounter
from tome_core import patch

PUTTING_ON = {"install", "uninstall", "put_on", "take_off"}


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.inference_mode():
        yield


def _operators(case):
    run = host_time.make_run(case)
    with OperatorCounter() as counter:
        run()
    return counter.by_name


def test_times_are_positive_and_the_table_has_every_row(monkeypatch):
    monkeypatch.setattr(host_time, "_BLOCKS", 1)
    monkeypatch.setattr(models, "SHAPES", {models.SD15: models.SHAPES[models.SD15]})
    data = host_time.measure(1)
    assert all(value > 0 for value in data["block_us"][host_time.UNMERGED].values())
    assert all(value > 0 for times in data["patch_ms"].values() for value in times.values())
    named = [line.strip().partition("  ")[0] for line in host_time.table(data).splitlines()]
    for row in (*data["block_us"], *next(iter(data["patch_ms"].values()))):
        wanted = f"a block, {row}" if row == host_time.UNMERGED else row
        assert named.count(wanted) == 1 + (row in data["calls"]), row  # timed, and counted
    assert host_time.TOMESD in data["block_us"]
    assert all(way["calls"] == sum(way["by"].values()) for way in data["calls"].values())


def test_the_command_prints_it(capsys):
    assert host_time.main(["--repeats", "1"]) == 0
    said = capsys.readouterr().out
    assert torch.__version__ in said and all(name in said for name in (*models.SHAPES, "changes of file"))


def test_a_wrong_option_is_refused(capsys):
    with pytest.raises(SystemExit) as caught:
        host_time.main(["--repeats", "0"])
    assert caught.value.code == 2 and "from 1 up" in capsys.readouterr().err


@pytest.mark.parametrize("case, most", [
    (host_time.KEPT, MOST_CALLS), (host_time.CLOSED, MOST_CALLS_LEFT_ALONE), (host_time.OFF, MOST_CALLS_SWITCHED_OFF),
])  # fmt: skip
def test_a_kept_merge_is_a_short_way_through_few_files_and_a_block_left_alone_is_passed_through(case, most):
    way = host_time.count_calls(case)
    told = "\n".join(f"{count} {name}" for name, count in way["by"].items())
    assert 0 < way["calls"] <= most and way["changes"] <= MOST_CHANGES, told


def test_each_case_is_what_it_is_called():
    unmerged, closed, off = map(_operators, (host_time.UNMERGED, host_time.CLOSED, host_time.OFF))
    assert off == unmerged and closed - unmerged == {"transpose": 3}, "views with which the attention function is asked"
    kept, renewed, anew = (_kernels(case).total() for case in (host_time.KEPT, host_time.RENEWED, host_time.ANEW))
    assert _kernels(host_time.UNMERGED).total() < kept < 2 * kept < renewed < anew


# Of one block beyond an unpatched one, without views: what a GPU would launch a kernel for, were none of them fused.
# Keys and values are each summed by three, the correction is three.
MOST_KERNELS = {host_time.KEPT: 9, host_time.RENEWED: 86, host_time.ANEW: 98}
MOST_KERNELS_UNCORRECTED = {host_time.KEPT: 6, host_time.RENEWED: 33, host_time.ANEW: 45}


@pytest.mark.parametrize("case", MOST_KERNELS)
def test_a_match_is_few_kernels(case):
    """Counted, so that one more is seen: whoever adds it says here what for."""
    for name, most in ((case, MOST_KERNELS[case]), (case + host_time.WITHOUT, MOST_KERNELS_UNCORRECTED[case])):
        found = _kernels(name) - _kernels(host_time.UNMERGED)
        assert found.total() <= most, f"{name}: {dict(found.most_common())}"


def _kernels(case):
    """Operators that compute something."""
    return Counter({name: count for name, count in _operators(case).items() if name not in VIEWS})


def _called_in_a_step(name):
    """What is called of us in a step that runs the UNet, and in one that does not."""
    unet, inputs = models.make(name, "cpu", torch.float32, True), models.inputs(name, 512, "cpu", torch.float32, True)
    handle = patch(unet, "balanced", host_clock=True)

    def step(timestep, call):
        handle.set_time(timestep=timestep, sampling="picture")
        with handle.unmerged():
            pass
        if call:
            unet(*inputs)

    step(500.0, call=True)
    return [python_calls.watch(lambda: step(499.0, call=True)), python_calls.watch(lambda: step(498.0, call=False))]


def test_a_step_puts_nothing_on_and_tells_the_time_without_a_look_at_the_blocks():
    sizes = set()
    for name in models.SHAPES:
        whole, outside = _called_in_a_step(name)
        assert not PUTTING_ON & {name.rpartition(".")[2] for name in whole}
        sizes.add(len(outside))
    assert len(sizes) == 1, "what is done before a call does not grow with the UNet"


def test_watching_ends_with_what_is_watched():
    before = sys.getprofile()
    with pytest.raises(ZeroDivisionError):
        python_calls.watch(lambda: 1 / 0)
    assert sys.getprofile() is before
    assert python_calls.watch(lambda: sorted([2, 1], key=abs)) == []
