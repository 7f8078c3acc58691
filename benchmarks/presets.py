"""What the presets stand for: ``python -m benchmarks.presets RESULT.json...`` picks it from measured fronts.

A preset may spend a share of the attention work, on average over the noise schedule. Noisy steps bear far more
merging than late ones, so every pair of settings, one for the early and one for the late steps, is looked at, with
every time between them; the pair with the least deviation over all checkpoints within the budget is the preset.
Levels below the finest, and their MLPs, are added as far as they add little to that: which of them a picture has
depends on the model's family and on its size. Needs results of ``python -m benchmarks.quality --for choose`` with the
rows "merged keys", and for the latter "keys below" and "MLP below"; writes ``tome_core/preset_table.py``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import purposes, results
from benchmarks.quality_figures import Noised, sections
from benchmarks.quality_rows import TIMES
from benchmarks.variant_list import FRONT, KEYS_BELOW, MLP_BELOW, refine_of
from tome_core import MergeRule

TABLE = Path(__file__).parents[1] / "tome_core" / "preset_table.py"
# share of the attention work that each may spend
BUDGETS = {"quality": 1 / 5, "balanced": 1 / 16, "fast": 1 / 24, "max": 1 / 64}
# of all of them; kept for 100 timesteps a match serves three steps of 20 (measured: 2 % more deviation 50 timesteps
# later, 16 % more 100 later, 6 % on average)
_COMMON = {"side": "kv", "metric": "keys+values", "use_rand": False, "keep": 100.0, "only_if_it_pays": True}
# Of a preset's deviation: what the levels below the finest may add to it with their keys, and with their MLPs. These
# only in the late steps: there they add to what is large, in the early ones they would be all there is, and whole
# pictures showed it (PSNR 2 to 3.6 dB less at quality).
BELOW_SHARE = 0.2
_EVERY_LEVEL = 8  # times smaller than the latent: the deepest that these models have
_EDGES = tuple((low + high) / 2 for low, high in pairwise(TIMES))
_PAIRS = 3  # of settings in the first line of a preset
_TOLERANCE = 0.002  # of a budget: ratios of whole tokens and cells come near it, not upon it


class Point(NamedTuple):
    """One setting of the front. work: share of attention left; dev: per cent of the v-loss at each time."""

    ratio: float
    cell: int
    work: float
    dev: tuple[float, ...]


class Below(NamedTuple):
    """What merging below the finest level costs, per cent of the v-loss at each time: keys and MLPs, by ratio."""

    keys: dict[float, tuple[float, ...]]
    mlp: dict[float, tuple[float, ...]]

    def settings(self, choice: Choice) -> dict[str, Any]:
        """What of it a preset may have besides, as `MergeRule` takes it: keys at all times, MLPs in its late steps."""
        keys = [_mean(dev) for ratio, dev in self.keys.items() if ratio >= choice.late.ratio]
        if not keys or min(keys) > BELOW_SHARE * choice.dev:
            return {}
        allowed = BELOW_SHARE * _mean(choice.late_part(choice.late.dev))
        ratios = [ratio for ratio, dev in self.mlp.items() if _mean(choice.late_part(dev)) <= allowed]
        return {"max_downsample": _EVERY_LEVEL, **({"deep_mlp": max(ratios)} if ratios else {})}


class Choice(NamedTuple):
    """What a preset does; early is None where one setting serves all steps."""

    late: Point
    early: Point | None
    until: float
    work: float
    dev: float

    def late_part(self, values: Sequence[float]) -> list[float]:
        """Those of the times after its early phase; the engine's default where it has none."""
        until = MergeRule().early_until if self.early is None else self.until
        return [value for time, value in zip(TIMES, values, strict=True) if time < until]

    def settings(self) -> dict[str, Any]:
        """As `MergeRule` takes them."""
        cell = self.late.cell
        cells = {} if cell == 2 else {"sx": cell, "sy": cell, "refine": refine_of(self.late.ratio, cell)}
        early = {} if self.early is None else {"early_ratio": self.early.ratio, "early_until": self.until}
        return {"ratio": self.late.ratio, **cells, **early}


def front(records: Sequence[dict]) -> list[Point]:
    """The settings that were measured on every checkpoint of these results. Raises ValueError where there are none."""
    points = []
    for ratio, cell in FRONT:
        found = _measured(records, "merged-keys", ratio, cell)
        if found:
            points.append(Point(ratio, cell, found[0].work, _at_times(found)))
    if not points:
        raise ValueError("no result has rows of merged keys at all times; run python -m benchmarks.quality first")
    return points


def below(records: Sequence[dict]) -> Below:
    """What these results say of the levels below the finest; empty where they say nothing."""
    keys = {ratio: _measured(records, "keys-below", ratio, cell) for ratio, cell in KEYS_BELOW}
    mlp = {ratio: _measured(records, "MLP-below", ratio) for ratio in MLP_BELOW}
    return Below(*({ratio: _at_times(found) for ratio, found in line.items() if found} for line in (keys, mlp)))


def _at_times(found: Sequence[Noised]) -> tuple[float, ...]:
    return tuple(_mean([one.dev_at[place].value for one in found]) for place in range(len(TIMES)))


def _measured(records: Sequence[dict], line: str, ratio: float, cell: int = 2) -> list[Noised]:
    """One setting on each checkpoint of the results that have it; none where a checkpoint or a time is missing."""
    name = f"{line}-{ratio}" + (f"-cells-{cell}" if cell != 2 else "")
    with_it = [record for record in records if any(one["name"] == name for one in record["settings"]["variants"])]
    found = [section.noised.get(name) for record in with_it for section in sections(record)]
    return found if all(one is not None and len(one.dev_at) == len(TIMES) for one in found) else []


def choose(points: Sequence[Point], budget: float) -> Choice:
    """The least deviation within the budget. Raises ValueError where even the cheapest setting is beyond it."""
    within = [one for one in _choices(points) if one.work <= budget + _TOLERANCE]
    if not within:
        raise ValueError(f"no setting was measured that leaves {budget:.3g} of the work")
    return min(within, key=lambda one: one.dev)


def _choices(points: Sequence[Point]) -> Iterator[Choice]:
    for late in points:
        yield Choice(late, None, 0.0, late.work, _mean(late.dev))
        for early in points:
            for place, edge in enumerate(_EDGES, 1):
                if early.work < late.work:
                    share = place / len(TIMES)
                    work = share * late.work + (1 - share) * early.work
                    yield Choice(late, early, edge, work, _mean((*late.dev[:place], *early.dev[place:])))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def written(choices: dict[str, Choice], deeper: Below, sources: Sequence[str]) -> str:
    """The module that holds the table."""
    lines = [
        '"""What each preset stands for. Generated by ``python -m benchmarks.presets``: run that, do not edit this.',
        "",
        f"From {', '.join(sources)}.",
        '"""',
        "",
        f"_ALL = {_literal(_COMMON)}",
        "",
        "# preset -> settings of one `MergeRule`. work: share of self-attention's products that is left, on average",
        "# over the noise schedule; deviation: of the prediction, in % of the v-loss. Both at the finest level; keys",
        f"# and MLPs below it add at most {BELOW_SHARE:.0%} each.",
        "TABLE = {",
    ]
    for name, choice in choices.items():
        settings = choice.settings() | deeper.settings(choice)
        lines.append(f"    # work {choice.work:.3f}, deviation {choice.dev:.2f}")
        pairs = [_literal({key: value})[1:-1] for key, value in settings.items()]
        lines.append(f'    "{name}": {{**_ALL, {", ".join(pairs[:_PAIRS])},')
        lines.append(f"        {', '.join(pairs[_PAIRS:])}}},")
    return "\n".join([*lines, "}", ""])


def _literal(settings: dict[str, Any]) -> str:
    return "{" + ", ".join(f'"{key}": {_value(value)}' for key, value in settings.items()) + "}"


def _value(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


def main(arguments: list[str] | None = None) -> int:
    """Choose, print and write; 2 with a sentence where the results do not suffice."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.presets", description=__doc__.splitlines()[0])
    parser.add_argument("results", nargs="+", type=Path, metavar="RESULT.json")
    parser.add_argument("--output", type=Path, default=TABLE, metavar="FILE", help="default: the engine's own table")
    options = parser.parse_args(arguments)
    try:
        records = [results.load(path) for path in options.results]
        for path, record in zip(options.results, records, strict=True):
            purposes.check(record, purposes.CHOOSE, path.name)
        points, deeper = front(records), below(records)
        choices = {name: choose(points, budget) for name, budget in BUDGETS.items()}
    except (ValueError, OSError, results.ResultError) as error:
        print(error, file=sys.stderr)
        return 2
    text = written(choices, deeper, [path.name for path in options.results])
    options.output.write_text(text, encoding="utf-8")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
