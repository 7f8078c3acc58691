"""``python -m tests.beside.sweep``: every network and every pipeline of the installed diffusers, one line each.

They are found by walking its modules, so that a new diffusers shows what is new. Of each network that is known here a
small one is drawn with, and so is each pipeline around one: if every token is its own group the picture is the unmerged
one, merged it is finite, removed it is the same bits, nobody has drawn from the random generator, nothing is left. What
is not known has to be refused with its name. What cannot be made or drawn with says why.

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
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import diffusers
import pytest
import torch
from torch import nn

import tome_core
from benchmarks.results import save
from tests import models, tiny_pipeline, tiny_transformers, transformer_pipelines
from tests.beside import own_parts
from tests.families import MODELS, Family
from tests.traces import traces
from tome_core.models import find_models
from tome_core.models.transformer import NAMES

Make = Callable[[], own_parts.Made]
Ways = dict[str, list[Make]]  # by the names of pipelines
SETTINGS = {"side": "kv", "ratio": 0.75, "max_downsample": 8, "only_if_it_pays": False}
TAKEN = "taken, and drawn in its pipelines alone"
LARGER = {"height": 128, "width": 128}
OUTCOMES = ("FAULT", "merges nothing", "merges", "refused", "not drawn", "not made", "taken", "left out")
NEAR = 1e-3  # other sums, and UNets that amplify them; of the unmerged picture


class Fault(Exception):
    """A law is broken."""


def expect(holds: bool, law: str) -> None:
    if not holds:
        raise Fault(law)


def classes(base: type, pattern: str = "") -> list[type]:
    """diffusers' own that derive from it, each by its name; modules that lack a package are passed over."""
    for one in pkgutil.walk_packages(diffusers.__path__, "diffusers."):
        if one.name.startswith(("diffusers.models.", "diffusers.pipelines.")):
            try:
                importlib.import_module(one.name)
            except (ImportError, RuntimeError):
                continue

    def below(kind: type) -> Iterator[type]:
        for one in kind.__subclasses__():
            yield one
            yield from below(one)

    found = {one.__name__: one for one in below(base) if one.__module__.startswith("diffusers.")}
    return [found[name] for name in sorted(found) if any(part in name for part in pattern.split("|"))]


def hold(target: object, draw: Callable[[], torch.Tensor]) -> str:
    """Whether the laws hold, and what merged."""
    own = find_models(target)

    def drawn() -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(0)
        return draw(), torch.get_rng_state()

    (plain, state), before = drawn(), [traces(one) for one in own]
    with pytest.MonkeyPatch.context() as patches, tome_core.patch(target, **SETTINGS):
        models.merge_with_self(patches)
        equal, after = drawn()
    far = ((equal - plain).norm() / plain.norm()).item()
    expect(far < NEAR, f"every token its own group: off by {far:.1e}")
    expect(torch.equal(after, state), "the random generator was used")
    with tome_core.patch(target, **SETTINGS) as handle:
        merged, after = drawn()
    told = handle.report()
    expect(merged.shape == plain.shape and bool(merged.isfinite().all()), "merged: not finite")
    expect(torch.equal(after, state), "merged: the random generator was used")
    expect(told.merged_anything != torch.equal(merged, plain), "the report does not say what the picture does")
    expect(torch.equal(drawn()[0], plain), "removed: other bits")
    expect([traces(one) for one in own] == before, "removed: something is left")
    why = ", ".join(sorted({why for level in told.levels for why in level.reasons}))
    expect(told.merged_anything or bool(why), "nothing merges, and nobody says why")
    return ("merges" if told.merged_anything else "merges nothing") + (f"; left alone: {why}" if why else "")


@cache
def small() -> dict[str, list[Family]]:
    """The small models of the tests, by the names of their networks' classes."""
    found: dict[str, list[Family]] = {}
    for name, one in MODELS.items():
        tiny = tiny_transformers.MODELS.get(name)
        kind = tiny.kind if tiny else type(find_models(one.build())[0]).__name__
        found.setdefault(kind, []).append(one)
    return found


def network(kind: type) -> str:
    """What becomes of its small ones, or of itself."""
    found = []
    for one in small().get(kind.__name__, ()):
        model = one.build()
        found.append(f"{one.name} {hold(model, lambda: one.call(model))}")  # noqa: B023, called at once
    return "; ".join(found) or refused([kind.__name__], on_meta(kind))


def on_meta(kind: type) -> nn.Module:
    """As large as it is, without memory."""
    with torch.device("meta"):
        return kind()


def refused(networks: list[str], target: object) -> str:
    """It may be, with the name of one of its networks, if none of them is known; else `TAKEN`."""
    try:
        tome_core.patch(target).remove()
    except tome_core.UnsupportedModelError as error:
        expect(any(one in str(error) for one in networks), f"refused without its name: {error}")
        expect(not {*networks} & {*NAMES}, f"it is known, and refused: {error}")
        return f"refused: {str(error).partition('. ')[0][:120]}"
    return TAKEN


def pipeline(ways: list[Make]) -> str:
    """What becomes of it by each way to make one; by those that do not work if none does."""
    told = [line_of(lambda: pipeline_of(*make())) for make in ways]  # noqa: B023, called at once
    works = [one for one in told if not one.startswith("not ")]
    return "; ".join(dict.fromkeys(works or told)) or "left out: no way to make one is known"


def pipeline_of(pipe: Any, call: dict[str, Any]) -> str:
    """It merges, or what it is around is told."""
    told = refused([type(one).__name__ for one in pipe.components.values() if isinstance(one, nn.Module)], pipe)
    if told != TAKEN:
        return told
    for more in ({"output_type": "latent"}, {}):
        try:
            plain = own_parts.draw(pipe, {**call, **more})
            break
        except Exception as error:  # of some there are no latents
            failed = error
    else:
        return f"not drawn: {said(failed)}"
    if not plain.isfinite().all():
        return "not drawn: what it gives is not finite"
    told = hold(pipe, lambda: own_parts.draw(pipe, {**call, **more}))
    if told.startswith("merges nothing") and "height" in inspect.signature(pipe.__call__).parameters:
        try:
            own_parts.draw(pipe, {**call, **more, **LARGER})
        except Exception:  # what else it is called with is of another size
            return told
        return hold(pipe, lambda: own_parts.draw(pipe, {**call, **more, **LARGER}))
    return told


def ways_of(checkouts: list[Path]) -> Ways:
    """How each pipeline is made, by its name: as the first checkout that knows it does, or as these tests do."""
    found: Ways = {}
    for checkout in checkouts:
        known = own_parts.cases(checkout)
        found = {name: [partial(own_parts.make, one) for one in ones] for name, ones in known.items()} | found
    own = [(way.kind, partial(transformer_pipelines.make, name))
           for name, way in transformer_pipelines.PIPELINES.items()]  # fmt: skip
    own += [(make.__annotations__["return"], partial(_tiny, make)) for make in
            (tiny_pipeline.stable_diffusion, tiny_pipeline.stable_diffusion_xl)]  # fmt: skip
    for name, make in own:
        found.setdefault(name, []).append(make)
    return found


def _tiny(make: Callable[[Path], Any]) -> own_parts.Made:
    with torch.random.fork_rng(), TemporaryDirectory() as folder:
        return make(Path(folder)), {"prompt": "a b", "num_inference_steps": 2}


def said(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:100]}"


# --- the run ----------------------------------------------------------------------------------------------------------


def line_of(ask: Callable[[], str]) -> str:
    """What becomes of a class, or why nobody knows."""
    try:
        return ask()
    except Fault as fault:
        return f"FAULT: {fault}"
    except Exception as error:
        return f"not made: {said(error)}"


def main(arguments: list[str] | None = None) -> int:
    """Run; 1 where a law is broken."""
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
    found = json.loads(options.output.read_text("utf-8")) if options.output and options.output.exists() else {}
    wanted = [(one, partial(network, one)) for one in classes(diffusers.ModelMixin, "UNet|Transformer|DiT")]
    ways, kinds = ways_of(options.diffusers), classes(diffusers.DiffusionPipeline)
    wanted += [(one, partial(pipeline, ways.get(one.__name__, []))) for one in kinds]
    wanted, since = [one for one in wanted if options.only in one[0].__name__], time.monotonic()
    for place, (kind, ask) in enumerate(wanted, 1):
        if kind.__name__ not in found:
            found[kind.__name__] = line_of(ask)
            print(f"{place}/{len(wanted)} {kind.__name__}: {found[kind.__name__]}", flush=True)
            if options.output:
                save(found, options.output)
    counts = Counter(next(what for what in OUTCOMES if what in found[kind.__name__]) for kind, _ in wanted)
    told = ", ".join(f"{counts[what]} {what}" for what in OUTCOMES)
    print(f"{len(wanted)} classes in {time.monotonic() - since:.0f} s: {told}")
    return int(counts["FAULT"] > 0)


if __name__ == "__main__":
    sys.exit(main())
