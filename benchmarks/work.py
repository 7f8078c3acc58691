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
from diffusers import UNet2DConditionModel
from torch import nn

import tome_core
from benchmarks import models, report, results, timing
from benchmarks.models import SD15, SDXL
from benchmarks.report import markdown
from tome_core.measuring.expected import expected_share
from tome_core.patching import curve_of
from tome_core.settings.presets import MARKS, change_rules

LABELS = {SD15: "SD1.5", SDXL: "SDXL"}
PIXELS = (512, 768, 1024, 1536, 2048)
STRENGTHS = ("quality", "balanced", "max")
STEPS = 20
NOTHING = "0%"
FEW_STEPS = (1, 2, 4, 8, STEPS)
_LEVELS, _DEPTHS = ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"), "transformer_layers_per_block"
_PUBLISHED = {
    "block_out_channels": (320, 640, 1280), "attention_head_dim": (5, 10, 20), _DEPTHS: (1, 2, 10),
    "down_block_types": _LEVELS, "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "cross_attention_dim": 2048, "use_linear_projection": True, "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256, "projection_class_embeddings_input_dim": 2816}  # fmt: skip
LAYOUTS: dict[str, dict[str, Any]] = {  # diffusers' configurations of the UNets that people draw with
    "SDXL, its inpainting model, Kolors, Playground, Pony, Illustrious, NoobAI": _PUBLISHED,
    "SSD-1B": _PUBLISHED | {_DEPTHS: [1, [2, 2], [4, 4]], f"reverse_{_DEPTHS}": [[4, 4, 10], [2, 1, 1], 1],
                            "mid_block_type": "UNetMidBlock2D"},
    "KOALA-1B": _PUBLISHED | {_DEPTHS: [1, 2, 6], "layers_per_block": 1},
    "KOALA-700M": _PUBLISHED | {_DEPTHS: [1, 2, 5], "layers_per_block": 1, "mid_block_type": None},
    "Segmind Vega": _PUBLISHED | {_DEPTHS: [1, 1, 2], "mid_block_type": "UNetMidBlock2D"},
    "SDXL's refiner, in all steps of a picture": _PUBLISHED | {
        _DEPTHS: 4, "block_out_channels": (384, 768, 1536, 1536), "attention_head_dim": (6, 12, 24, 24),
        "down_block_types": (*_LEVELS, "DownBlock2D"), "up_block_types": ("UpBlock2D", *_PUBLISHED["up_block_types"]),
        "cross_attention_dim": 1280, "projection_class_embeddings_input_dim": 2560},
    "SD2.1": {"cross_attention_dim": 1024, "attention_head_dim": (5, 10, 20, 20), "use_linear_projection": True},
}  # fmt: skip


@cache
def _unet(name: str) -> nn.Module:
    """Make a UNet of `LABELS` on torch's meta device, once a process."""
    with torch.device("meta"):
        return models.UNet(models.SHAPES[name]).half()


def unet_of(name: str, device: str = "meta") -> nn.Module:
    """Return a UNet of `LABELS` without memory, which says that its calls are on a device, see `share`."""
    return _called_on(_unet(name), device)


def _called_on(unet: nn.Module, device: str) -> nn.Module:
    """Mark a UNet as accelerate marks a model whose weights are elsewhere than its calls, and return it."""
    unet._hf_hook = SimpleNamespace(execution_device=torch.device(device))
    return unet


def layout_of(label: str) -> nn.Module:
    """Make a UNet of `LAYOUTS` on torch's meta device, whose calls seem to be on a GPU that never waits."""
    with torch.device("meta"):
        return _called_on(UNet2DConditionModel(**LAYOUTS[label]).half(), "meta")


def config_of(name: str, strength: str, blocks: bool = True) -> tome_core.MergeConfig:
    """Return the settings of a named strength for a UNet of `LABELS`; blocks: whether whole blocks merge too."""
    config = tome_core.preset(strength, curve_of(_unet(name)))
    return config if blocks else change_rules(config, 0.0)


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


def layouts_table() -> str:
    """Make the Markdown table of what `balanced` leaves out at 1024 px: a row a layout, a column a number of steps."""
    rows = []
    for label in LAYOUTS:
        unet = layout_of(label)
        config = tome_core.preset("balanced", curve_of(unet))
        rows.append((label, *(f"{expected_share(unet, config, 1024, 1024, steps):.0%}" for steps in FEW_STEPS)))
    return markdown(("layout", *(f"{steps} step{'s' * (steps > 1)}" for steps in FEW_STEPS)), rows)


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
