"""What the embedded models draw, on one sheet: `python -m demo.samples`. A row for each of them, a column a prompt."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
from PIL import Image

from demo import comparison_sheet, prompt, sampler
from demo import model as scene_model

SHEET = Path(__file__).with_name("samples.png")
MORE_PROMPTS = ("dawn sea peaks right", "night sea hills right white ball", "day desert peaks")


def grid(checkpoints: list[Path], steps: int) -> np.ndarray:
    """The sheet's pixels, uint8 [rows * H, columns * W, 3]; seed 0 everywhere."""
    rows = []
    for number, path in enumerate(checkpoints, 1):
        model, row = scene_model.load(path), []
        for words in (*prompt.PROMPTS, *MORE_PROMPTS):
            row.append(sampler.sample(model, prompt.tokens(words), 0, steps=steps))
            print(f"\rmodel {number} of {len(checkpoints)}: {len(row)} pictures", end="", file=sys.stderr, flush=True)
        rows.append(np.concatenate(row, 1))
    print(file=sys.stderr)
    if len({row.shape for row in rows}) > 1:
        raise ValueError("the models draw pictures of different sizes, which fit on no one sheet; give them one by one")
    return np.concatenate(rows)


def main(arguments: list[str] | None = None) -> int:
    """Draw and write the sheet; gives the exit code: 0 done, 2 a file that is no scene model."""
    parser = argparse.ArgumentParser(prog="python -m demo.samples", description=__doc__)
    parser.add_argument("checkpoints", type=Path, nargs="*", default=list(scene_model.CHECKPOINTS))
    parser.add_argument("--steps", type=int, default=20, help="solver steps (default 20)")
    parser.add_argument("--output", type=Path, default=SHEET, help="the PNG (default %(default)s)")
    options = parser.parse_args(arguments)
    try:
        comparison_sheet.write(Image.fromarray(grid(options.checkpoints, options.steps)), options.output)
    except (ValueError, OSError) as error:
        print(f"demo.samples: {error}", file=sys.stderr)
        return 2
    print(options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
