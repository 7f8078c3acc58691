"""Weights in eight bits, half of float16's bytes: `python -m demo.eight_bits FILE ...` packs files of `demo.train`."""

from __future__ import annotations

import os
import sys

import torch
from safetensors import safe_open
from safetensors.torch import save_file

SCALE = ".scale"  # behind a weight's name: that of its steps
_LEAST = 4096  # numbers; smaller weights, among them the first and the last convolution and the words, stay float16


def pack(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Large weights ``[out, ...]`` as int8 with a step of each output channel, float16 ``[out]``; others as float16."""
    packed = {}
    for name, value in weights.items():
        packed[name] = value.half()
        if value.dim() > 1 and value.numel() >= _LEAST:
            step = (value.float().abs().flatten(1).amax(1) / 127).half().clamp(min=2**-24)
            packed[name] = (value.float() / _beside(step, value)).round().clamp(-127, 127).to(torch.int8)
            packed[name + SCALE] = step
    return packed


def unpack(packed: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights as float32, whether they were packed or not."""
    weights = {name: value.float() for name, value in packed.items() if not name.endswith(SCALE)}
    return {
        name: value * _beside(packed[name + SCALE], value) if name + SCALE in packed else value
        for name, value in weights.items()
    }


def _beside(step: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return step.float().view(-1, *[1] * (value.dim() - 1))


def main(paths: list[str]) -> None:
    """Pack these files in place."""
    for path in paths:
        with safe_open(path, "pt") as file:
            weights, metadata = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
        save_file(pack(unpack(weights)), f"{path}.part", metadata)
        os.replace(f"{path}.part", path)
        print(path)


if __name__ == "__main__":
    main(sys.argv[1:])
