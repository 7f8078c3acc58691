"""``python -m benchmarks.transformers``: the share of a transformer's work that a strength leaves out, by its shape.

Work is multiplications, counted from published shapes without a model, as `benchmarks.work` does for UNets. Layers
outside of blocks, and what runs once for a picture, are left out: a few percent.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import NamedTuple

import tome_core
from benchmarks.report import markdown
from benchmarks.work import gain
from tome_core.models.transformer_blocks import middle
from tome_core.settings.presets import TRANSFORMER

STRENGTHS = ("balanced", "max")


class Shape(NamedTuple):
    """A transformer with a picture or film of one size."""

    name: str
    blocks: int
    channels: int
    weights: float  # by which a token is multiplied in a block, in squares of `channels`
    tokens: int
    text: int  # tokens in the same attention
    steps: Sequence[int]
    shift: float = 1.0  # of the sampler's schedule


SHAPES = (
    Shape("Flux schnell, 1024 px", 57, 3072, 12, 4096, 256, (4,)),
    Shape("Flux dev, 1024 px", 57, 3072, 12, 4096, 512, (4, 8, 20), 3.16),
    Shape("Qwen-Image, 1328 px, Lightning", 60, 3072, 12, 6889, 256, (4, 8), 3.0),
    Shape("Z-Image Turbo, 1024 px", 30, 3840, 12, 4096, 128, (8,), 3.0),
    Shape("SD3.5 large, 1024 px", 38, 2432, 12, 4096, 333, (20,), 3.0),
    Shape("Wan 14B, 81 frames of 480p", 40, 5120, 11.4, 32760, 0, (4, 20), 5.0),
)


def sigmas(steps: int, shift: float) -> list[float]:
    """Return the noise levels of a flow model's steps, the noisiest first."""
    return [shift * place / (1 + (shift - 1) * place) for place in (1 - step / steps for step in range(steps))]


def share(shape: Shape, strength: str, steps: int) -> float:
    """Return the share of the work of a picture's blocks, 0 to 1, that a named strength leaves out."""
    rules, left = tome_core.preset(strength, TRANSFORMER).rules, 0.0
    merging = len(middle(range(shape.blocks))) / shape.blocks
    for step, sigma in enumerate(sigmas(steps, shape.shift), start=1):
        rule = next((rule for rule in rules if rule.holds_at(1000 * sigma) and step <= rule.most_steps), None)
        merged = _work(shape, shape.tokens * (1 - rule.ratio)) / _work(shape, shape.tokens) if rule else 1.0
        left += merging * merged + 1 - merging
    return 1 - left / steps


def _work(shape: Shape, tokens: float) -> float:
    """Return the multiplications of a block for so many tokens of the picture, divided by its channels."""
    tokens += shape.text
    return tokens * shape.weights * shape.channels + 2 * tokens**2


def shares_table() -> str:
    """Make the Markdown table of `share`: a row a transformer and number of steps, a column a strength."""
    rows = []
    for shape in SHAPES:
        for steps in shape.steps:
            left_out = [share(shape, strength, steps) for strength in STRENGTHS]
            rows.append((shape.name, str(steps), *(f"{part:.0%} ({gain(part)})" for part in left_out)))
    return markdown(("", "steps", *(f"`{strength}`" for strength in STRENGTHS)), rows)


def main(arguments: list[str] | None = None) -> int:
    """Print the table; return 0. arguments: None means ``sys.argv[1:]``."""
    argparse.ArgumentParser(prog="python -m benchmarks.transformers", description=__doc__).parse_args(arguments)
    print(shares_table())
    return 0


if __name__ == "__main__":
    sys.exit(main())
