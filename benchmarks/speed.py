"""How fast is merging, beside its peers and its bounds? ``python -m benchmarks.speed`` measures it in one run.

Models have the shapes of Stable Diffusion 1.5 and XL and random weights, so nothing is downloaded and nothing is said
about pictures. Variants take turns in every round; times are processor time of one thread on a CPU and events on a
GPU. The run can be stopped at any time: the same command goes on where it was.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks import report, results, speed_report
from benchmarks.speed_costs import Rates, free_memory
from benchmarks.speed_measure import Fleet, SpeedBench, measure_rates
from benchmarks.speed_models import SHAPES, TINY_SHAPES, Shape, make_decoder, make_unet
from benchmarks.speed_options import complete, parser, plan_cases, settings
from benchmarks.speed_plan import CALL, COSTS, Estimate, UNetCase, row_keys
from benchmarks.speed_summary import failures
from benchmarks.speed_variants import pick_for

_EFFICIENCY = {"cpu": 0.6, "cuda": 0.4}  # of a large product's speed, what a whole UNet reaches


class Workshop:
    """The model in use, its fleets, and the bench of one case: made when a row asks for another."""

    def __init__(
        self, shapes: dict[str, Shape], device: str, dtype: torch.dtype, names: list[str], rates: Rates
    ) -> None:
        self._shapes, self._device, self._dtype, self._names, self._rates = shapes, device, dtype, names, rates
        self._model: str | None = None
        self._unet = self._decoder = self._bench = None
        self._fleets: dict[tuple[str, bool], Fleet] = {}

    def measure(self, case: UNetCase, part: str, failed: dict[str, str]) -> dict:
        """The row. failed: the case's variants that failed in an earlier row, in another process perhaps, and why."""
        fresh = self._bench is None or self._bench.case != case
        if fresh:
            self._bench = None
            self._load(case.model)
            how = case.attention, case.compiled
            if how not in self._fleets:
                self._fleets[how] = Fleet(self._unet, self._names, *how)
            shape = self._shapes[case.model]
            if case.what != CALL and self._decoder is None:
                self._decoder = make_decoder(shape, self._device, self._dtype)
            self._bench = SpeedBench(case, shape, self._fleets[how], self._rates, self._decoder, failed)
        if part == COSTS:
            return self._bench.costs()
        if fresh:
            self._bench.warm_up()
        return self._bench.round(int(part))

    def _load(self, model: str) -> None:
        """Have one model in memory at a time: what does not fit is to be the method's fault."""
        if self._model != model:
            self._unet = self._decoder = None
            self._fleets.clear()
            free_memory(torch.device(self._device))
            self._unet, self._model = make_unet(self._shapes[model], self._device, self._dtype), model


def execute(run: results.Run, rows: dict, workshop: Workshop, estimate: Estimate, minutes: float | None) -> None:
    """Measure what is missing, until all is there or the next row would not fit into the minutes."""
    begin = time.monotonic()
    with torch.inference_mode():
        todo = run.missing
        for number, key in enumerate(todo, 1):
            left = sum(estimate.seconds(*rows[one]) for one in todo[number - 1 :])
            if minutes is not None and time.monotonic() - begin + estimate.seconds(*rows[key]) > 60 * minutes:
                remedy = "; it needs --minutes " + f"{1 + estimate.seconds(*rows[key]) / 60:.0f}" if number == 1 else ""
                _say(f"the next row would end after {minutes:g} minutes, so the run ends here{remedy}")
                return
            _say(f"[{number}/{len(todo)}] {key}; {_duration(left)} left")
            since = time.monotonic()
            earlier = [row for row in run.record["rows"] if row["case"] == vars(rows[key][0])]
            failed = {name: why for row in earlier for name, why in row["failed"].items()}
            run.add(key, workshop.measure(*rows[key], failed))
            estimate.learn(*rows[key], time.monotonic() - since)


def print_plan(all_cases: list[UNetCase], rows: dict, missing: list[str], estimate: Estimate) -> None:
    """What will be measured, and how long that may take."""
    _say("plan, with estimates that the run itself corrects:")
    for case in all_cases:
        left = [rows[key] for key in missing if rows[key][0] == case]
        if left:
            _say(f"  {case.key:<55} {len(left):>3} rows {_duration(sum(estimate.guess(*row) for row in left)):>9}")
    _say(f"  {'together':<55} {len(missing):>3} rows {_duration(sum(estimate.guess(*rows[k]) for k in missing)):>9}")


def _duration(spent: float) -> str:
    return f"{spent:.0f} s" if spent < 100 else f"{spent / 60:.0f} min"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def measure(options: argparse.Namespace, command: str) -> int:
    """The whole run, up to its end or to that of its minutes; gives 1 where a variant failed, memory apart."""
    complete(options)
    torch.set_num_threads(1)
    shapes, all_cases = TINY_SHAPES if options.rehearsal else SHAPES, plan_cases(options)
    rows, dtype = row_keys(all_cases, options.rounds), getattr(torch, options.dtype)
    record = results.new_record("speed", command, settings(options), results.describe(options.device))
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) if options.rehearsal else results.FOLDER
        run = results.Run.start(record, list(rows), options.output, folder)
        rates = measure_rates(options.device, dtype)
        reached = _EFFICIENCY[options.device] * rates.operations
        estimate = Estimate(shapes, lambda case: len(pick_for(case, options.variants)), options.device, reached)
        print_plan(all_cases, rows, run.missing, estimate)
        workshop = Workshop(shapes, options.device, dtype, options.variants, rates)
        execute(run, rows, workshop, estimate, options.minutes)
    print(speed_report.table([run.record]))
    if run.path.exists():
        _say(f"result: {run.path}; a plot: python -m benchmarks.report {run.path}")
    return 1 if failures(run.record) else 0


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; 0 done, 1 where a variant failed for another reason than memory, 2 wrong options."""
    return report.run("speed", parser(__doc__), arguments, measure)


if __name__ == "__main__":
    sys.exit(main())
