"""The benchmark of attention without fused kernels: what it plans, tells from few heads, and shows."""

from __future__ import annotations

import math
import sys

import pytest

from benchmarks import unfused, unfused_report
from benchmarks.unfused_hosts import HEADS, SOURCES
from tome_core import preset

GIB = 2**30


def row(what: str, pixels: int, heads: int, peak: float, *seconds: float) -> dict:
    return {"key": f"{what} {pixels} {heads}", "source": "math", "what": what, "pixels": pixels, "heads": heads,
            "peak_mib": peak, "seconds": dict(enumerate(seconds))}  # fmt: skip


def test_what_does_not_fit_is_measured_with_few_heads_or_not_at_all():
    rule = preset("balanced")
    heads = {(what, pixels): unfused.choose_heads("math", what, pixels, rule, 5 * GIB)
             for what in unfused.WHATS for pixels in unfused.PIXELS}  # fmt: skip
    assert heads["unmerged", 512] == heads["late", 1024] == heads["early", 2048] == (HEADS,)
    assert heads["unmerged", 1024] == (1, 2) and heads["unmerged", 2048] == ()
    assert unfused.choose_heads("webui-split", "unmerged", 2048, rule, 5 * GIB) == (1, 2)
    v1 = [unfused.choose_heads("webui-split-v1", "unmerged", pixels, rule, 5 * GIB) for pixels in (1024, 2048)]
    assert v1 == [(HEADS,), ()], "two heads at a time, whatever is free: no fewer of them say more"


def test_a_plan_has_no_source_without_a_checkout(monkeypatch, capsys):
    for name in ("COMFYUI_DIR", "WEBUI_DIR"):
        monkeypatch.delenv(name, raising=False)
    plan = unfused.plan_cases(unfused.parser().parse_args(["--pixels", "512"]))
    assert {case["source"] for case in plan.values()} == {"math"} and len(plan) == 4
    assert unfused.main(["--sources", "comfyui-quad"]) == 2
    assert "COMFYUI_DIR" in capsys.readouterr().err


@pytest.mark.parametrize(("one", "two", "all_heads"), [(1100.0, 2100.0, 8100.0), (488.0, 424.0, 488.0)])
def test_all_heads_are_told_from_one_and_two_and_none_takes_less_than_nothing(one, two, all_heads):
    rows = [row("unmerged", 1024, 1, one, 2.0), row("unmerged", 1024, 2, two, 3.0)]
    assert unfused_report.figures(rows, "balanced") == {("math", 1024, "unmerged"): (all_heads, 9.0, "*")}


def test_a_picture_is_the_mean_of_its_steps_and_the_dearest_of_its_peaks():
    rows = [row("early", 512, 8, 100.0, 1.0, 3.0), row("late", 512, 8, 200.0, 10.0, 30.0)]
    until = preset("balanced").early_until
    noisy = sum(step >= until for step in range(951, 0, -50)) / 20
    peak, seconds, how = unfused_report.figures(rows, "balanced")["math", 512, "merged"]
    assert (peak, how) == (200.0, "") and math.isclose(seconds, noisy * 2 + (1 - noisy) * 20)


def test_what_does_not_fit_follows_from_smaller_pictures_and_so_does_the_largest():
    tokens = {pixels: (pixels // 8) ** 2 for pixels in (512, 1024, 2048)}
    rows = [row("unmerged", pixels, 8, 0.01 * n + 1e-5 * n * n, n * 2.0) for pixels, n in list(tokens.items())[:2]]
    rows.append(row("tomesd", 2048, 8, 5.0, 1.0))
    found = unfused_report.figures(rows, "balanced")
    peak, seconds, how = found["math", 2048, "unmerged"]
    assert how == "**" and math.isclose(peak, 0.01 * tokens[2048] + 1e-5 * tokens[2048] ** 2)
    assert math.isclose(seconds, 2.0 * tokens[2048])
    curve = unfused_report._curve(found, "math", "unmerged")
    assert unfused_report.largest(curve, peak) == 2048 and unfused_report.largest(curve, peak * 0.99) == 1984


def test_what_cuts_its_work_to_fit_follows_no_curve():
    rows = [{**row("unmerged", pixels, 8, peak, 1.0), "source": "webui-split"}
            for pixels, peak in ((512, 1000.0), (1024, 990.0))]  # fmt: skip
    rows.append({**row("tomesd", 2048, 8, 5.0, 1.0), "source": "webui-split"})
    found = unfused_report.figures(rows, "balanced")
    assert ("webui-split", 2048, "unmerged") not in found
    assert unfused_report._curve(found, "webui-split", "unmerged") is None


def test_what_grows_by_less_than_the_tokens_foretells_no_larger_picture():
    rows = [row("unmerged", 512, 8, 227.0, 1.0), row("unmerged", 1024, 8, 865.0, 17.0)]
    rows.append(row("tomesd", 2048, 8, 5.0, 1.0))
    found = unfused_report.figures(rows, "balanced")
    assert ("math", 2048, "unmerged") not in found
    assert not any("unmerged" in line for line in unfused_report._largest(found))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="a process tells its peak on Linux alone")
def test_a_case_is_measured_in_a_process_of_its_own():
    case = {"source": "math", "what": "late", "pixels": 256, "heads": 1, "free": GIB, "preset": "balanced"}
    late, wrong, tomesd = unfused.measure([case, {**case, "preset": "none of ours"}, {**case, "what": "tomesd"}])
    assert late["peak_mib"] > 0 and set(late["seconds"]) == {"new", "kept"} and all(late["seconds"].values())
    assert "none of ours" in wrong["failed"] and set(tomesd["seconds"]) == {"call"}


@pytest.mark.slow
def test_a_process_that_ends_too_early_fails_its_case_alone(monkeypatch):
    case = {"source": "math", "what": "late", "pixels": 256, "heads": 1, "free": GIB, "preset": "balanced"}
    broken, whole = unfused.measure([{**case, "heads": "one"}, case])
    assert "failed" in broken and whole["seconds"]


def test_every_source_says_what_it_is():
    assert all(one.meaning and (one.host == "" or one.flags) for one in SOURCES.values())
