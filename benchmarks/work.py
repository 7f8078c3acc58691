"""``python -m benchmarks.work``: the share of a UNet's work that merging leaves out, by strength and picture size.

Work is multiplications. They are counted from the shapes of SD1.5's and SDXL's UNets, which are made without memory, so
the command takes seconds on any machine. ``--time sdxl --pixels 1024`` also times what is counted: each step of a
picture unmerged and merged, with random weights, on one thread of this CPU. That takes minutes a step, and leaves a
result.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

import tome_core
from benchmarks import models, report, results, timing
from benchmarks.models import SD15, SDXL
from benchmarks.report import markdown
from tome_core.measuring.expected import expected_share
from tome_core.patching import curve_of
from tome_core.settings.presets import MARKS

LABELS = {SD15: "SD1.5", SDXL: "SDXL"}
PIXELS = (512, 768, 1024, 1536, 2048)
STRENGTHS = ("quality", "balanced", "max")
STEPS = 20
NOTHING = "0%"


@cache
def _unet(name: str) -> nn.Module:
    """Make a UNet of `LABELS` on torch's meta device, once a process."""
    with torch.device("meta"):
        return models.UNet(models.SHAPES[name]).half()


def unet_of(name: str, device: str = "meta") -> nn.Module:
    """Return a UNet of `LABELS` without memory, which says that its calls are on a device, see `share`."""
    unet = _unet(name)
    # as accelerate marks a model whose weights are elsewhere than its calls
    unet._hf_hook = SimpleNamespace(execution_device=torch.device(device))
    return unet


def config_of(name: str, strength: str, blocks: bool = True) -> tome_core.MergeConfig:
    """Return the settings of a named strength for a UNet of `LABELS`; blocks: whether whole blocks merge too."""
    config = tome_core.preset(strength, curve_of(_unet(name)))
    return config if blocks else replace(config, rules=tuple(rule for rule in config.rules if not rule.merge_blocks))


def share(name: str, strength: str, pixels: int, device: str = "meta", blocks: bool = True) -> float:
    """Return the share of a UNet's work, 0 to 1, that a named strength leaves out in 20 steps of a square picture.

    device: "cpu", where smaller levels merge, or "meta", which stands for a GPU that never waits for launches. blocks:
    whether whole blocks merge too.
    """
    return expected_share(unet_of(name, device), config_of(name, strength, blocks), pixels, pixels, STEPS)


def gain(left_out: float) -> str:
    """Format how many times as fast a machine is that waits for multiplications alone."""
    return f"{1 / (1 - left_out):.2f}"


def shares_table() -> str:
    """Make the Markdown table of `share` on a GPU: a row a UNet and strength, a column a size."""
    rows = [(LABELS[name], f"`{strength}`", *(_cell(share(name, strength, pixels)) for pixels in PIXELS))
            for name in LABELS for strength in STRENGTHS]  # fmt: skip
    return markdown(("", "strength", *(f"{pixels} px" for pixels in PIXELS)), rows)


def _cell(left_out: float) -> str:
    """Format a share and the gain: ``37% (1.60)``, or ``0%`` if nothing merges."""
    return f"{left_out:.0%} ({gain(left_out)})" if left_out else NOTHING


def time_steps(name: str, pixels: int, strength: str, steps: int, tiny: bool = False) -> dict[str, Any]:
    """Time each step of a picture without guidance, unmerged and merged in turn, on one CPU thread in float32.

    Returns processor seconds by step, ``unmerged`` and ``merged``, and ``work_saved``, the share that the merged
    picture's report tells. tiny: almost no channels, for tests.
    """
    unmerged = models.make(name, "cpu", torch.float32, tiny)
    merged = models.copy_sharing_weights(unmerged)
    latent, _, *more = (argument[:1] for argument in models.inputs(name, pixels, "cpu", torch.float32, tiny))
    seconds: dict[str, list[float]] = {"unmerged": [], "merged": []}
    timesteps = [999 - 1000 * step / steps for step in range(steps)]
    # random weights err more than trained ones, so the error is not bounded
    config = replace(tome_core.preset(strength, curve_of(merged)), max_error=None)
    with torch.inference_mode(), tome_core.patch(merged, config) as handle, handle.sampling(1, timesteps):
        for number, timestep in enumerate(timesteps):
            arguments = latent, torch.tensor([timestep]), *more
            for way, unet in (("unmerged", unmerged), ("merged", merged)):
                seconds[way].append(timing.seconds(lambda unet=unet: unet(*arguments)))  # noqa: B023 - called at once
            print(f"  step {number + 1}/{steps}: {seconds['unmerged'][-1]:.1f} s, merged {seconds['merged'][-1]:.1f} s",
                  file=sys.stderr, flush=True)  # fmt: skip
        return {**seconds, "work_saved": handle.report().work_saved}


def times_as_fast(row: dict[str, Any]) -> float:
    """Return how many times as fast a timed picture was: all unmerged steps over all merged ones."""
    return sum(row["unmerged"]) / sum(row["merged"])


def table(records: Sequence[results.Record]) -> str:
    """Make the Markdown of results of ``--time``: a line a picture, with the share that its report told, and times."""
    rows = [(row["key"], f"{row['work_saved']:.0%}", gain(row["work_saved"]), f"{times_as_fast(row):.2f}",
             f"{sum(row['unmerged']):,.0f}, {sum(row['merged']):,.0f}")
            for record in records for row in record["rows"]]  # fmt: skip
    heads = ("picture", "less work", "counted, times as fast", "timed, times as fast", "unmerged, merged, s")
    return markdown(heads, rows)


def execute(options: argparse.Namespace, command: str) -> None:
    """Print the table of shares, or time pictures and print their table."""
    if not options.time:
        return print(shares_table())
    torch.set_num_threads(1)  # the processor time of several counts their waiting
    strength = options.strength
    cases = {f"{name}, {pixels} px, {strength}": (name, pixels) for name in options.time for pixels in options.pixels}
    settings = {"steps": options.steps, "tiny": options.tiny}
    record = results.new_record("work", command, settings, results.describe("cpu"))
    run = results.Run.start(record, list(cases), options.output)
    for key in run.missing:
        print(key, file=sys.stderr, flush=True)
        run.add(key, time_steps(*cases[key], strength, options.steps, options.tiny))
    print(report.write([run.path]))


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return 0, 2 after an error, 130 if stopped. None means ``sys.argv[1:]``."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.work", description=__doc__.partition("\n\n")[2])
    add = parser.add_argument
    add("--time", nargs="+", choices=tuple(LABELS), metavar="NAME", help=f"time these UNets: {', '.join(LABELS)}")
    add("--pixels", nargs="+", type=int, default=[1024], metavar="N", help="sides of timed pictures (default 1024)")
    add("--steps", type=int, default=STEPS, metavar="N", help="steps of a timed picture (default %(default)s)")
    add("--strength", choices=tuple(MARKS), default="balanced", metavar="NAME",
        help=f"of timed pictures: {', '.join(MARKS)} (default %(default)s)")  # fmt: skip
    add("--tiny", action="store_true", help="time tiny UNets: for tests")
    report.add_output(parser)
    return report.run("work", parser, arguments, execute)


if __name__ == "__main__":
    sys.exit(main())
