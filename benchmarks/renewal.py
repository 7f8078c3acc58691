"""``python -m benchmarks.renewal``: what cheaper ways to renew a match and its fit cost in error.

Scene models predict noised pictures, merged by strengths without whole blocks; a row's figures are squared errors to
the unmerged predictions. The ways: another fit, one match for several attentions, and spreads of all tokens. If you
stop it, the same command goes on.
"""

import argparse
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from operator import truediv
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from tqdm import tqdm

import tome_core
from benchmarks import judges, report, results, subjects
from benchmarks.own_error import MODELS
from benchmarks.variants import engine
from demo import checkpoint
from tome_core.attention import correction
from tome_core.attention.correction import Correction, Pair
from tome_core.engine import state
from tome_core.merging import grid, metric
from tome_core.merging.plan import MergePlan
from tome_core.patching import curve_of

NOW, STRENGTHS, TIMES = "as it is", ("quality", "balanced", "max"), (100, 300, 500, 700, 900)
_PARTS = {"transformer": r"transformer_blocks\.\d+.*", "stage": r"attentions\.\d+.*"}


def _fitted(parts: str, penalty: float) -> AbstractContextManager:
    """Return a context in which a correction is fitted from the query ("q"), the merged answer ("o") or both ("qo").

    The first order and a constant are always there; with "" nothing else is. `penalty` counts as so many samples for
    each unknown.
    """
    fit = correction.fit_correction

    def other(q: Tensor, places: Tensor, pair: Pair, plan: MergePlan, scale: float) -> tuple[Correction, Pair]:
        made, merged_pair = fit(q, places, pair, plan, scale)
        heads, width = q.shape[2:]
        queries, means = q[:, places].transpose(1, 2), plan.merge_pair(*pair, exact=True)[2]
        known = correction.first_order(*pair, means, plan, heads, scale).flatten(0, 1).to(q.dtype)
        sizes = plan.log_sizes(q.dtype)[:, None, None]
        merged = correction._attend(queries, *merged_pair, heads, scale, sizes).flatten(0, 1)
        exact = correction._attend(queries, *pair, heads, scale).flatten(0, 1)
        queries = queries.flatten(0, 1)
        left, matrix = exact - merged - queries @ known, torch.cat([known, torch.zeros_like(known)], 1)
        average, shift = left.mean(1, keepdim=True), 0.0
        for names in [parts] if parts else ():
            features = [{"q": queries, "o": merged}[name] for name in names]
            unit = [(x - x.mean(1, keepdim=True)).square().mean((1, 2), keepdim=True).rsqrt() for x in features]
            z = torch.cat([x * one for x, one in zip(features, unit, strict=True)], 2)
            x, penalties = z - z.mean(1, keepdim=True), penalty * z.shape[2] * torch.eye(z.shape[2])
            weights = torch.linalg.solve(x.mT @ x + penalties, x.mT @ (left - average))
            shift = z.mean(1, keepdim=True) @ weights
            for name, some, one in zip(names, weights.split(width, 1), unit, strict=True):
                first = "qo".index(name) * width
                matrix[:, first : first + width] += some * one
        return made._replace(matrix=matrix, constant=average - shift), merged_pair

    return mock.patch("tome_core.attention.merged.fit_correction", other)


def _shared(part: str) -> AbstractContextManager:
    """Return a context in which all attentions of a `part` of the model, see `_PARTS`, share the first match."""
    find, found = state.find_plans, {}

    def shared(call: Any, key: tuple, rule: Any, device: torch.device, match_rows: Callable) -> Any:
        if found.get("call") is not call:
            found.clear()
            found["call"] = call
        same = re.sub(_PARTS[part], "", str(key[0][0])), *key[1:]
        if same not in found:
            found[same] = find(call, key, rule, device, match_rows)
        return found[same]

    return mock.patch.object(state, "find_plans", shared)


@contextmanager
def _changed(**constants: int) -> Iterator[None]:
    """Be a context in which `correction` has other constants, by name, and nothing is known that was made of them."""
    with mock.patch.multiple(correction, **constants):
        grid._CACHE.clear()
        yield
    grid._CACHE.clear()


def _of_all_tokens() -> AbstractContextManager:
    """Return a context in which keys and values are centred and scaled by the mean and variance of all tokens."""
    return mock.patch.object(metric, "_FEW", 2**20)


# name -> a function that returns a context in which a call renews so
WAYS: dict[str, Callable[[], AbstractContextManager]] = {
    NOW: nullcontext,
    "fit in whole heads, penalty 1": lambda: _fitted("qo", 1.0),
    "fit from the answer": lambda: _fitted("o", 0.2),
    "fit from the query": lambda: _fitted("q", 0.2),
    "nothing fitted": lambda: _fitted("", 0.0),
    "fit to twice the answers": lambda: _changed(_MOST_IF_NARROW=256),
    "fit to half of the answers": lambda: _changed(_MOST_IF_NARROW=64),
    "one match a transformer": lambda: _shared("transformer"),
    "one match a stage": lambda: _shared("stage"),
    "spread of all tokens": _of_all_tokens,
}


def rows(names: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """Yield (model, strength, way) of each row."""
    return ((name, strength, way) for name in names for strength in STRENGTHS for way in WAYS)


def measure(run: results.Run, opened: dict[str, Any], pictures: int) -> None:
    """Measure and add missing rows; a row has ``squared_error``, by time. opened: names -> paths of the models."""
    subject, known = None, {}
    wanted = {"/".join(row): row for row in rows(list(opened))}
    for key in tqdm(run.missing, unit="row", mininterval=0.1 if sys.stderr.isatty() else 10):
        name, strength, way = wanted[key]
        if subject is None or subject.name != name:
            subject, known = subjects.SceneSubject(opened[name], torch.device("cpu")), {}
        config = replace(tome_core.preset(strength, curve_of(subject.network)), max_error=None)
        config = replace(config, rules=tuple(rule for rule in config.rules if not rule.merge_blocks))
        errors = []
        for time in TIMES:
            noised = subject.add_noise(0, pictures, time)
            if time not in known:
                known[time] = subject.predict(noised)
            with WAYS[way](), engine(config=config, only_if_it_pays=False)(subject.network, 0):
                merged = subject.predict(noised)
            errors.append((merged - known[time]).double().square().mean().item())
        run.add(key, {"squared_error": errors})


def table(records: Sequence[results.Record]) -> str:
    """Make the Markdown table: a row a way, a column a model and strength: the mean over times of errors' ratios."""
    errors = {row["key"]: row["squared_error"] for record in records for row in record["rows"]}
    columns = list(dict.fromkeys(key.rpartition("/")[0] for key in errors))
    lines = []
    for way in WAYS:
        ratios = []
        for column in columns:
            new, now = (errors.get(f"{column}/{name}", ()) for name in (way, NOW))
            ratio = fmean(map(truediv, new, now)) if new and now and all(now) else None
            ratios.append(report.number(ratio, ".2f"))
        lines.append((way, *ratios))
    return report.markdown(("squared error, relative", *(column.replace("/", ", ") for column in columns)), lines)


def execute(options: argparse.Namespace, command: str) -> None:
    """Measure missing rows and print the table. Raises ValueError for a model that is no UNet of scenes."""
    torch.set_num_threads(1)
    paths = {path.stem: path for path in options.model}
    judges.check(options.model)
    for path in paths.values():
        if checkpoint.is_transformer(checkpoint.read_shapes(path)):
            raise ValueError(f"{path} is a transformer, whose attention strengths do not merge; give a UNet of scenes")
    settings = {"models": {name: subjects.fingerprint(path) for name, path in paths.items()},
                "pictures": options.pictures, "times": list(TIMES)}  # fmt: skip
    record = results.new_record("renewal", command, settings, results.describe("cpu"))
    run = results.Run.start(record, ["/".join(row) for row in rows(list(paths))], options.output)
    with torch.no_grad():
        measure(run, paths, options.pictures)
    print(report.write([run.path]))


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return 0, 2 after an expected error, 130 if stopped. None means ``sys.argv[1:]``."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.renewal", description=__doc__.partition("\n\n")[2])
    parser.add_argument("--model", nargs="+", type=Path, default=list(MODELS), metavar="PATH",
                        help="scene models (default: those of benchmarks.own_error)")
    parser.add_argument("--pictures", type=int, default=4, metavar="N", help="noised pictures (default %(default)s)")
    report.add_output(parser)
    return report.run("renewal", parser, arguments, execute)


if __name__ == "__main__":
    sys.exit(main())
