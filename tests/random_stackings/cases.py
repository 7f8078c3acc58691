"""One case by its seed and number: a session with a UNet, or a ComfyUI graph."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

from tests.random_stackings import comfy_graphs, laws
from tests.random_stackings.sessions import weighted

COMMAND = "python -m tests.random_stackings"
KINDS: dict[Callable[[random.Random, bool], Counter], int] = {laws.hold: 14, comfy_graphs.hold: 3}


def run(seed: int, number: int) -> Counter:
    """What became of the case; raises AssertionError if a law is broken. Every 16th is drawn twice."""
    dice = random.Random(f"{seed} {number}")
    kind = weighted(dice, KINDS)
    return Counter({kind.__module__.rpartition(".")[2]: 1}) + kind(dice, number % 16 == 0)
