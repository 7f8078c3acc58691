"""The speed benchmark: it finishes, it goes on after a kill, and it prints nothing that it has no control for."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from diffusers import UNet2DConditionModel
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import report, results, speed, speed_measure, speed_options, speed_plan, speed_report, speed_variants
from benchmarks.networks import finest_blocks
from benchmarks.speed_costs import OperatorCount, Rates, process_peak
from benchmarks.speed_measure import Fleet, SpeedBench
from benchmarks.speed_models import SHAPES, TINY_SHAPES, make_inputs, make_unet, twin
from benchmarks.speed_plan import Estimate, UNetCase, row_keys
from benchmarks.speed_summary import summaries
from benchmarks.speed_variants import CONTROL, IDEAL, NO_ATTENTION, VARIANTS, pick_for
from tests.speed_records import synthetic
from tome_core.engine import decision

LATE = "ours, late new"
CALLS = ("early new", "early kept", "late new", "late kept", "max new", "max kept")
SMOKE = ("--smoke", "--suites", "calls", "--variants", LATE, "ideal")


def run(*arguments, output):
    """The command's exit code; the result is in `output`."""
    return speed.main([*arguments, "--output", str(output)])


@pytest.fixture(scope="module", autouse=True)
def known_rates():
    """A device's rates take seconds to measure, and have a test of their own in test_speed_costs.py."""
    with pytest.MonkeyPatch.context() as patching:
        patching.setattr(speed, "measure_rates", lambda device, dtype: Rates(1e11, 1e10))
        yield


@pytest.fixture(scope="module")
def tiny_grids_pay():
    """Presets and tiles leave the tiny models' grids alone otherwise."""
    with pytest.MonkeyPatch.context() as patching:
        patching.setattr(decision, "_LEAST", {"cpu": 0})
        patching.setattr(speed_variants, "_LEAST_TILE", 2)
        yield


@pytest.fixture(scope="module")
def record(tmp_path_factory, tiny_grids_pay):
    """A small run of calls and pictures; copy it before changing it."""
    output = tmp_path_factory.mktemp("speed") / "few.json"
    assert run("--smoke", "--variants", *(f"ours, {one}" for one in CALLS), "ours, max", output=output) == 0
    return results.load(output)


@pytest.mark.slow
def test_the_smallest_run_measures_every_variant(tmp_path, tiny_grids_pay):
    assert run("--smoke", output=tmp_path / "smoke.json") == 0
    record = results.load(tmp_path / "smoke.json")
    assert record["kind"] == "speed" and record["missing"] == []
    assert record["versions"]["tomesd"] == "0.1.3" and record["device"]["threads"] == 1
    assert [case.case["what"] for case in summaries(record)] == ["call", "picture"]
    for case in summaries(record):
        assert list(case.figures) == pick_for(UNetCase(**case.case), list(VARIANTS))
        assert all(figure.times[0] > 0 and figure.factor > 0 for figure in case.figures.values())
        assert case.figures[CONTROL].factor == 1
        assert case.figures["ours" if "ours" in case.figures else LATE].operators > case.figures[CONTROL].operators
    text = speed_report.table([record])
    assert all(f"| {name} |" in text for name in VARIANTS) and "no measurement" in text


def test_the_costs_of_a_call_that_keeps_a_match_are_without_that_match(record):
    figures = summaries(record)[0].figures
    for phase in ("early", "late", "max"):
        kept, new = figures[f"ours, {phase} kept"], figures[f"ours, {phase} new"]
        assert kept.operators < new.operators and kept.bound < new.bound


def test_table_and_plot_come_from_the_file_alone(record, tmp_path, capsys):
    file, plot, table = (tmp_path / f"alone.{kind}" for kind in ("json", "png", "md"))
    results.save(record, file)
    assert report.main([str(file), "--plot", str(plot), "--table", str(table)]) == 0
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert table.read_text(encoding="utf-8").strip() == speed_report.table([record]) == capsys.readouterr().out.strip()


@pytest.mark.slow
def test_a_killed_run_goes_on_and_ends_with_the_same_rows(tmp_path, monkeypatch):
    whole, killed = tmp_path / "whole.json", tmp_path / "killed.json"
    assert run(*SMOKE, output=whole) == 0
    add = results.Run.add

    def add_once(self, *arguments):
        add(self, *arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(results.Run, "add", add_once)
        assert run(*SMOKE, output=killed) == 130
    first = results.load(killed)
    assert len(first["rows"]) == 1 and first["missing"]
    assert run(*SMOKE, output=killed) == 0
    both = [results.load(path) for path in (whole, killed)]
    assert both[1]["rows"][0] == first["rows"][0]
    described = [[(row["key"], list(row.get("seconds", ()))) for row in one["rows"]] for one in both]
    assert described[0] == described[1] and both[1]["missing"] == []


def failing(error):
    def apply(unet):
        def forward(*_, **__):
            raise error

        unet.forward = forward

    return apply


@pytest.mark.slow
@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory. Tried"), MemoryError(),
     RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried")], ids=lambda error: type(error).__name__,
)  # fmt: skip
def test_running_out_of_memory_is_a_result(tmp_path, monkeypatch, error):
    monkeypatch.setitem(VARIANTS, LATE, VARIANTS[LATE]._replace(apply=failing(error)))
    output = tmp_path / "result.json"
    assert run(*SMOKE, output=output) == 0
    (case,) = summaries(results.load(output))
    assert case.figures[LATE].failed == "out of memory" and not case.figures[LATE].times
    assert case.figures[IDEAL].factor > 0
    assert f"| {LATE} | out of memory |" in speed_report.table([results.load(output)])


def test_where_the_control_fails_others_have_no_factor_and_what_is_not_for_memory_is_told(tmp_path, monkeypatch):
    for name, error in ((CONTROL, MemoryError()), (LATE, IndexError("tuple index\nmore"))):
        monkeypatch.setitem(VARIANTS, name, VARIANTS[name]._replace(apply=failing(error)))
    output = tmp_path / "result.json"
    assert run(*SMOKE, output=output) == 1
    (case,) = summaries(results.load(output))
    assert case.figures[CONTROL].failed == "out of memory"
    assert case.figures[IDEAL].times and case.figures[IDEAL].factor is None
    text = speed_report.table([results.load(output)])
    assert f"{LATE}: IndexError: tuple index." in text and text.count("Failed: ") == 1


def test_a_figure_without_its_control_is_not_printed(record):
    whole = speed_report.table([record])
    changed = copy.deepcopy(record)
    for row in changed["rows"]:
        for values in row.values():
            if isinstance(values, dict) and row["case"]["what"] == "call":
                values.pop(CONTROL, None)
    text = speed_report.table([changed])
    call, picture = (case.key for case in summaries(record))
    assert f"### {call}" in whole and f"### {call}" not in text
    assert f"its control (vanilla) is missing: {call}" in text and f"### {picture}" in text


@pytest.mark.slow
def test_compiled_cases_stand_beside_the_same_ones_uncompiled(tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))  # no C++ compiler needed
    output = tmp_path / "result.json"
    assert run("--smoke", "--suites", "calls", "--variants", LATE, "ours, late kept", "--compile", output=output) == 0
    eager, compiled = summaries(results.load(output))
    assert compiled.case == {**eager.case, "compiled": True} and eager.case["compiled"] is False
    assert list(eager.figures) == [CONTROL, LATE, "ours, late kept"]
    assert list(compiled.figures) == [CONTROL, LATE], "which matches anew whatever was before"
    assert compiled.figures[LATE].times and compiled.figures[LATE].operators is None
    assert compiled.figures[LATE].bound == pytest.approx(eager.figures[LATE].bound, rel=1e-6)


def test_a_share_of_a_bound_is_the_part_of_its_saving():
    times = {CONTROL: [10.0, 20.0, 10.0], "tomesd": [8.0, 16.0, 80.0], "ours": [10.0, 20.0, 10.0],
             IDEAL: [6.0, 12.0, 6.0], NO_ATTENTION: [2.0, 4.0, 2.0]}  # fmt: skip
    (case,) = summaries(synthetic(**times))
    tomesd = case.figures["tomesd"]
    assert tomesd.factor == pytest.approx(1.25), "the median over rounds of ratios within a round"
    assert tomesd.of_ideal == pytest.approx(0.5) and tomesd.of_no_attention == pytest.approx(0.25)
    assert case.figures["ours"].of_ideal is None, "what merges more than half has another bound"
    assert case.figures["ours"].of_no_attention == pytest.approx(0)
    assert case.figures[IDEAL].of_ideal is None and case.figures[CONTROL].of_no_attention is None


def test_a_share_of_a_bound_that_saves_nothing_is_no_figure():
    (case,) = summaries(synthetic(**{CONTROL: [10.0], "tomesd": [9.0], IDEAL: [9.9]}))
    assert case.figures["tomesd"].of_ideal is None and case.figures["tomesd"].factor == pytest.approx(10 / 9)


@pytest.mark.slow
def test_a_rehearsal_goes_through_the_whole_plan_of_a_gpu(tmp_path, capsys):
    output = tmp_path / "dry.json"
    assert run("--dry-run", "--variants", LATE, "ours, max", output=output) == 0
    record = results.load(output)
    measured = {(c.case["model"], c.case["what"], c.case["pixels"], c.case["batch"], c.case["attention"])
                for c in summaries(record)}  # fmt: skip
    assert {("sd15", "call", size, 2, "sdpa") for size in (512, 768, 1024, 1536, 2048)} <= measured
    assert {("sdxl", "picture", 1024, 2, "sdpa"), ("sd15", "hires", 2048, 2, "sdpa")} <= measured
    seeds = {(size, 2 * pictures, how) for size in (512, 768, 1024) for pictures in (1, 2, 4, 8, 10)
             for how in ("sdpa", "naive")}  # fmt: skip
    assert {("sd15", "call", *one) for one in seeds} <= measured
    assert record["missing"] == []
    for case in summaries(record):
        assert list(case.figures) == [CONTROL, LATE if case.case["what"] == "call" else "ours, max"]
    told = capsys.readouterr().err
    assert "plan" in told and "together" in told and " left" in told


@pytest.mark.parametrize(("rate", "pieces"), [(3e14, 2), (7e13, 7)])
def test_the_standard_gpu_run_is_planned_for_a_few_pieces_of_ten_minutes(rate, pieces):
    """On GPUs that do so many operations a second in a UNet, as an H200 and a 4090 are assumed to."""
    options = speed_options.complete(speed_options.parser("").parse_args(["--dry-run"]))
    options.steps = speed_options.STEPS
    estimate = Estimate(SHAPES, lambda case: len(pick_for(case, list(VARIANTS))), "cuda", rate)
    guesses = [estimate.guess(*row) for row in row_keys(speed_options.plan_cases(options), 8).values()]
    assert 60 < sum(guesses) < pieces * 60 * speed_options.GPU_MINUTES and max(guesses) < 60 * speed_options.GPU_MINUTES


def test_no_row_is_begun_that_would_end_too_late(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Estimate, "seconds", lambda self, case, part: 0.0 if part == speed_plan.COSTS else 61.0)
    output = tmp_path / "result.json"
    assert run(*SMOKE, "--minutes", "1", output=output) == 0
    record = results.load(output)
    assert [row["key"].rsplit("#")[1] for row in record["rows"]] == ["costs"]
    told = capsys.readouterr()
    assert f"Not measured yet: {record['missing'][0]}" in told.out and "it needs" not in told.err
    assert run(*SMOKE, "--minutes", "1", output=output) == 0
    assert "it needs --minutes 2" in capsys.readouterr().err, "else it would never go on"


@pytest.mark.parametrize(("name", "millions"), [("sd15", 860), ("sdxl", 2567)])
def test_models_have_the_real_size_and_work(name, millions):
    with torch.device("meta"):
        unet = UNet2DConditionModel(**SHAPES[name].unet)
    assert round(sum(parameter.numel() for parameter in unet.parameters()) / 1e6) == millions
    positional, named = make_inputs(SHAPES[name], 768, 2, "meta", torch.float32)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        unet(*positional, **named)
    assert counter.get_total_flops() == pytest.approx(2 * SHAPES[name].operations(768), rel=0.001)


@pytest.mark.parametrize("model", sorted(SHAPES))
def test_every_variant_changes_every_model_and_no_other_twin(model, tiny_grids_pay):
    """tomesd's own default reaches nothing on SDXL, which would be measured as a method that costs nothing."""
    shape = TINY_SHAPES[model]
    unet = make_unet(shape, "cpu", torch.float32)
    positional, named = make_inputs(shape, 512, 2, "cpu", torch.float32)

    def picture(one):
        return one(*positional, **named).sample

    with torch.inference_mode():
        before = picture(unet)
        assert torch.isfinite(before).all() and before.std() > 1e-3
        for name, variant in VARIANTS.items():
            one = twin(unet)
            variant.apply(one)
            if "call" in variant.whats:
                speed_measure._begins(one)(1)
            else:
                one.tell_time(timestep=500.0)
            assert torch.equal(picture(one), before) == (name == CONTROL), name
            assert next(one.parameters()).data_ptr() == next(unet.parameters()).data_ptr()
        assert torch.equal(picture(unet), before), "whatever was done to its twins"


def test_the_ideal_bound_attends_to_half_of_the_tokens():
    seen = []

    def attention(x, **_):
        seen.append(x.shape)
        return x

    x = torch.randn(2, 15, 4)
    assert speed_variants.attend_half(attention, x).shape == x.shape and seen == [(2, 8, 4)]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*CALLS, "early renewed", "max renewed"])
def test_a_timed_call_does_what_its_row_says(name, work, monkeypatch):
    """Whatever has run before, the call of a smaller picture that a peak begins with too."""
    monkeypatch.setattr(decision, "_LEAST", {"cpu": 64})  # the finest level's, so large that something merges
    words = {"new": {"match"}, "renewed": {"renew"}, "kept": set()}[name.split()[1]]
    name, shape = f"ours, {name}", TINY_SHAPES["sd15"]
    fleet = Fleet(make_unet(shape, "cpu", torch.float32), [CONTROL, name])
    blocks = len(finest_blocks(fleet.unets[name]))
    with torch.inference_mode():
        for pixels in (512, 768):
            bench = SpeedBench(UNetCase("sd15", "call", pixels), shape, fleet, Rates(1e9, 1e9))
            bench.costs()
            bench._process_peak(name)
            for number in (1, 2, 3):
                work.clear()
                assert not bench.round(number)["failed"]
                assert set(work) == words, f"round {number} at {pixels} px"
                assert len(work) >= (blocks if words else 0)


def test_operators_are_counted_without_views():
    x = torch.randn(4, 4)
    with OperatorCount() as counter:
        (x.t() @ x).view(16).relu()
    assert counter.count == 2


def test_the_peak_of_a_call_is_told_by_a_fork_and_its_failure_too():
    def forgetful(mib):
        return lambda: torch.ones(mib, 2**18).sum()

    def fails():
        raise IndexError("told")

    peak = process_peak(forgetful(64), forgetful(1))
    if peak is None:
        pytest.skip("the peak of a single call is to be had on Linux only")
    assert 60 < peak < 70
    with pytest.raises(RuntimeError, match=r"^IndexError: told$"):
        process_peak(fails, forgetful(1))


@pytest.mark.parametrize(
    ("arguments", "telling"),
    [(["--sizes", "500"], "multiple of 64"), (["--rounds", "0"], "from 1 up"), (["--suites", "all"], "calls")],
)
def test_a_wrong_option_is_refused_with_a_right_one(arguments, telling, capsys):
    with pytest.raises(SystemExit) as caught:
        speed.main(arguments)
    assert caught.value.code == 2 and telling in capsys.readouterr().err


def test_what_cannot_be_measured_is_refused_with_a_remedy(monkeypatch, capsys):
    monkeypatch.setattr(speed_options.importlib.util, "find_spec", lambda name: None)
    wrong = {"pip install tomesd": ["--smoke", "--variants", "tomesd"],
             "on sd15": ["--smoke", "--suites", "hires", "--models", "sdxl", "--variants", "ours"]}  # fmt: skip
    if not torch.cuda.is_available():
        wrong["--device cpu"] = ["--device", "cuda", "--variants", "ours"]
    for remedy, arguments in wrong.items():
        assert speed.main(arguments) == 2 and remedy in capsys.readouterr().err
