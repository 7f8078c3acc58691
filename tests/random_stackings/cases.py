"""One case by its seed and number: a session with a UNet, a ComfyUI graph, or a webui's job."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

from tests.random_stackings import comfy_graphs, laws, webui_jobs
from tests.random_stackings.sessions import weighted

COMMAND = "python -m tests.random_stackings"
KINDS: dict[Callable[[random.Random, bool], Counter], int] = {
    laws.hold: 14, comfy_graphs.hold: 3, webui_jobs.hold: 1}  # fmt: skip


def run(seed: int, number: int) -> Counter:
    """What became of the case; raises AssertionError where a law is broken. Every 16th is drawn twice."""
    dice = random.Random(f"{seed} {number}")
    kind = weighted(dice, KINDS)
    return Counter({kind.__module__.rpartition(".")[2]: 1}) + kind(dice, number % 16 == 0)
