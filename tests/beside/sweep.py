"""``python -m tests.beside.sweep``: every network and every pipeline of the installed diffusers, one line each.

They are found by walking its modules, so that a new diffusers shows what is new. Each pipeline around a network that is
known is drawn with: if every token is its own group the picture is the unmerged one, merged it is finite, removed it is
the same bits, nobody has drawn from the random generator, nothing is left. What is not known has to be refused with its
name. What cannot be made or drawn with says why.

With ``--diffusers CHECKOUT [OLDER ...]`` pipelines are made of the parts that diffusers' own tests have, and called as
these do: ten minutes of one processor. Without it those that these tests make are drawn, and the others left out.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import logging
import pkgutil
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import diffusers
import pytest
import torch
from torch import nn

import tome_core
from benchmarks.results import save
from tests import models, tiny_pipeline, transformer_pipelines
from tests.beside import own_parts
from tests.traces import traces
from tome_core.models import find_models
from tome_core.models.transformer import NAMES

Make = Callable[[], own_parts.Made]
SETTINGS = {"side": "kv", "ratio": 0.75, "max_downsample": 8, "only_if_it_pays": False}
TAKEN = "taken, and drawn in its pipelines"
LATENT, LARGER = {"output_type": "latent"}, {"height": 128, "width": 128}
OUTCOMES = ("FAULT", "merges nothing", "merges", "refused", "not drawn", "not made", "taken", "left out")
NEAR = 1e-3  # other sums, and UNets that amplify them; of the unmerged picture


class Fault(Exception):
    """A law is broken."""


def expect(holds: bool, law: str) -> None:
    if not holds:
        raise Fault(law)


def classes(base: type, pattern: str = "") -> list[type]:
    """diffusers' own that derive from it, each by its name; modules that lack a package are passed over."""
    for module in pkgutil.walk_packages(diffusers.__path__, "diffusers."):
        if module.name.startswith(("diffusers.models.", "diffusers.pipelines.")):
            try:
                importlib.import_module(module.name)
            except (ImportError, RuntimeError):
                continue

    def below(kind: type) -> Iterator[type]:
        for derived in kind.__subclasses__():
            yield derived
            yield from below(derived)

    by_name = {kind.__name__: kind for kind in below(base) if kind.__module__.startswith("diffusers.")}
    return [by_name[name] for name in sorted(by_name) if any(part in name for part in pattern.split("|"))]


# --- what becomes of a network, and of a pipeline ---------------------------------------------------------------------


def hold(target: object, draw: Callable[[], torch.Tensor]) -> str:
    """Whether the laws hold, and what merged."""
    own = find_models(target)

    def drawn() -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(0)
        return draw(), torch.get_rng_state()

    (plain, state), before = drawn(), [traces(model) for model in own]
    with pytest.MonkeyPatch.context() as patches, tome_core.patch(target, **SETTINGS):
        models.merge_with_self(patches)
        equal, after = drawn()
    far = ((equal - plain).norm() / plain.norm()).item()
    expect(far < NEAR, f"every token its own group: off by {far:.1e}")
    expect(torch.equal(after, state), "the random generator was used")
    with tome_core.patch(target, **SETTINGS) as handle:
        merged, after = drawn()
    report = handle.report()
    expect(merged.shape == plain.shape and bool(merged.isfinite().all()), "merged: not finite")
    expect(torch.equal(after, state), "merged: the random generator was used")
    expect(report.merged_anything != torch.equal(merged, plain), "the report does not say what the picture does")
    expect(torch.equal(drawn()[0], plain), "removed: other bits")
    expect([traces(model) for model in own] == before, "removed: something is left")
    why = ", ".join(sorted({why for level in report.levels for why in level.reasons}))
    expect(report.merged_anything or bool(why), "nothing merges, and nobody says why")
    return ("merges" if report.merged_anything else "merges nothing") + (f"; left alone: {why}" if why else "")


def refused(networks: list[str], target: object) -> str:
    """It may be, with the name of one of its networks, if none of them is known; else `TAKEN`."""
    try:
        tome_core.patch(target).remove()
    except tome_core.UnsupportedModelError as error:
        expect(any(name in str(error) for name in networks), f"refused without its name: {error}")
        expect(not {*networks} & {*NAMES}, f"it is known, and refused: {error}")
        return f"refused: {str(error).partition('. ')[0][:120]}"
    return TAKEN


def network(kind: type) -> str:
    """What becomes of it; the tests draw with a small one of each that is known."""
    with torch.device("meta"):  # as large as it is, without memory
        return refused([kind.__name__], kind())


def pipeline(ways: list[Make]) -> str:
    """What becomes of it by each way to make one; by those that do not work if none does."""
    outcomes = [line_of(lambda: pipeline_of(*make())) for make in ways]  # noqa: B023, called at once
    works = [outcome for outcome in outcomes if not outcome.startswith("not ")]
    return "; ".join(dict.fromkeys(works or outcomes)) or "left out: no way to make one is known"


def pipeline_of(pipe: Any, call: dict[str, Any]) -> str:
    """It merges, or the network that it is around is named."""
    networks = [type(part).__name__ for part in pipe.components.values() if isinstance(part, nn.Module)]
    outcome = refused(networks, pipe)
    if outcome != TAKEN:
        return outcome
    try:
        more, plain = LATENT, own_parts.draw(pipe, call | LATENT)
    except Exception:  # of some there are no latents
        try:
            more, plain = {}, own_parts.draw(pipe, call)
        except Exception as error:
            return f"not drawn: {text_of(error)}"
    if not plain.isfinite().all():
        return "not drawn: what it gives is not finite"
    outcome = hold(pipe, lambda: own_parts.draw(pipe, call | more))
    if outcome.startswith("merges nothing") and "height" in inspect.signature(pipe.__call__).parameters:
        try:
            own_parts.draw(pipe, call | more | LARGER)
        except Exception:  # what else it is called with is of another size
            return outcome
        return hold(pipe, lambda: own_parts.draw(pipe, call | more | LARGER))
    return outcome


def ways_of(checkouts: list[Path]) -> dict[str, list[Make]]:
    """How each pipeline is made, by its name: as the first checkout that knows it does, or as these tests do."""
    ways: dict[str, list[Make]] = {}
    for checkout in checkouts:
        known = own_parts.cases(checkout)
        ways = {name: [partial(own_parts.make, case) for case in cases] for name, cases in known.items()} | ways
    for name, way in transformer_pipelines.PIPELINES.items():
        ways.setdefault(way.kind, []).append(partial(transformer_pipelines.make, name))
    for make in (tiny_pipeline.stable_diffusion, tiny_pipeline.stable_diffusion_xl):
        ways.setdefault(make.__annotations__["return"], []).append(partial(_tiny, make))
    return ways


def _tiny(make: Callable[[Path], Any]) -> own_parts.Made:
    with torch.random.fork_rng(), TemporaryDirectory() as folder:
        return make(Path(folder)), {"prompt": "a b", "num_inference_steps": 2}


# --- the run ----------------------------------------------------------------------------------------------------------


def text_of(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:100]}"


def line_of(ask: Callable[[], str]) -> str:
    """What becomes of a class, or why nobody knows."""
    try:
        return ask()
    except Fault as fault:
        return f"FAULT: {fault}"
    except Exception as error:
        return f"not made: {text_of(error)}"


def main(arguments: list[str] | None = None) -> int:
    """Run; 1 if a law is broken."""
    parser = argparse.ArgumentParser(prog="python -m tests.beside.sweep", description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="classes whose names have this in them")
    parser.add_argument("--diffusers", type=Path, nargs="*", default=[], metavar="CHECKOUT",
                        help="of diffusers' repository, whose tests have small parts of each pipeline; the newest "
                        "first, older ones for what it has no more")  # fmt: skip
    parser.add_argument("--output", type=Path, metavar="JSON", help="what was found; the same file is gone on with")
    options = parser.parse_args(arguments)
    logging.disable()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    lines = json.loads(options.output.read_text("utf-8")) if options.output and options.output.exists() else {}
    ways = ways_of(options.diffusers)
    asks = {kind.__name__: partial(network, kind) for kind in classes(diffusers.ModelMixin, "UNet|Transformer|DiT")}
    asks |= {kind.__name__: partial(pipeline, ways.get(kind.__name__, []))
             for kind in classes(diffusers.DiffusionPipeline)}  # fmt: skip
    names, since = [name for name in asks if options.only in name], time.monotonic()
    for place, name in enumerate(names, 1):
        if name not in lines:
            lines[name] = line_of(asks[name])
            print(f"{place}/{len(names)} {name}: {lines[name]}", flush=True)
            if options.output:
                save(lines, options.output)
    counts = Counter(next(outcome for outcome in OUTCOMES if outcome in lines[name]) for name in names)
    told = ", ".join(f"{counts[outcome]} {outcome}" for outcome in OUTCOMES)
    print(f"{len(names)} classes in {time.monotonic() - since:.0f} s: {told}")
    return int(counts["FAULT"] > 0)


if __name__ == "__main__":
    sys.exit(main())
